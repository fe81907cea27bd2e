"""The session with the broker (*pure*): HELLO, WELCOME, heartbeat, loss, GOAWAY.

Knows nothing of requests. :mod:`vram_conductor.client.core` asks it what to do with time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import (
    ConductorError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from vram_conductor.protocol.liveness import Liveness
from vram_conductor.protocol.messages import GoAway, Hello, Welcome

MS = 1_000_000
"""Nanoseconds in a millisecond."""

REDIAL_MS = 100
"""Pause before the next attempt when a connection broke before WELCOME."""


DRAINING = "draining"
"""Reason of a broker that leaves and has not begun what it was asked."""


class Phase(Enum):
    """``DOWN``: nobody answered and nobody asks. ``DIALLING``: HELLO is out."""

    DOWN = "down"
    DIALLING = "dialling"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the core waits for what, in milliseconds.

    Attributes:
        connect_ms: from the first HELLO to WELCOME.
        reconnect_ms: the same after a loss. The broker keeps a running job for ``orphan_ms``.
        quiet_ms: a job that said nothing for so long is asked whether a message was lost.
        cancel_ms: from CANCEL to the job's end; after that it counts as ended here.
        grace_ms: what is added to a deadline that the broker watches, before this side acts.
    """

    connect_ms: int = limits.HELLO_TIMEOUT_MS
    reconnect_ms: int = 15_000
    quiet_ms: int = 10_000
    cancel_ms: int = 10_000
    grace_ms: int = 5_000


class Session:
    """Phases and deadlines of one logical connection over any number of sockets."""

    def __init__(self, endpoint: str, client: str, timing: Timing) -> None:
        self.endpoint = endpoint
        self.phase: Phase = Phase.DOWN
        self.welcome: Welcome | None = None
        self.goaway: GoAway | None = None
        self._client = client
        self._timing = timing
        self._liveness: Liveness | None = None
        self._give_up_ns = 0
        self._redial_ns: int | None = None
        self._suspect: ConductorError | None = None

    @property
    def open(self) -> bool:
        return self.phase is Phase.OPEN

    @property
    def epoch(self) -> int | None:
        """``broker_epoch`` of the last WELCOME."""
        return self.welcome.broker_epoch if self.welcome else None

    def hello(self) -> Hello:
        return Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR), client=self._client)

    def dial(self, now_ns: int) -> None:
        """Begin to connect; the caller opens a socket and sends ``hello()``."""
        timing = self._timing
        patience_ms = timing.reconnect_ms if self.phase is Phase.OPEN else timing.connect_ms
        self.phase = Phase.DIALLING
        self.goaway = None
        self._liveness = None
        self._give_up_ns = now_ns + patience_ms * MS
        self._redial_ns = None
        self._suspect = None

    def broke(self, now_ns: int, suspect: ConductorError | None = None) -> None:
        """The connection went away before WELCOME: try again, though not at once. ``suspect``:
        what it is if it goes on like that."""
        self._suspect = suspect or self._suspect
        if self._redial_ns is None:
            self._redial_ns = now_ns + REDIAL_MS * MS

    def opened(self, welcome: Welcome, now_ns: int) -> ConductorError | None:
        """WELCOME arrived; an error if this side cannot talk to that broker."""
        if welcome.v[0] != limits.PROTOCOL_MAJOR:
            return Unimplemented(
                "unsupported_version",
                f"the broker speaks protocol {welcome.v[0]}.{welcome.v[1]}, this client "
                f"{limits.PROTOCOL_MAJOR}.{limits.PROTOCOL_MINOR}; upgrade the older one",
                theirs=welcome.v[0],
                ours=limits.PROTOCOL_MAJOR,
            )
        self.phase = Phase.OPEN
        self.welcome = welcome
        self._redial_ns = None
        self._liveness = Liveness(now_ns, max(1, welcome.heartbeat_ms))
        return None

    def ended_by(self, error: ConductorError) -> bool:
        """Whether an ERROR without a ``rid`` ends the session, or the attempt at one."""
        lost_key = self.phase is Phase.OPEN and isinstance(error, Unauthenticated)
        return lost_key or self.phase is Phase.DIALLING

    def gave_up(self) -> ConductorError:
        """Nobody answered in time: the phase is DOWN from now on."""
        self.phase = Phase.DOWN
        if self._suspect is not None:
            return self._suspect
        return self.no_broker()

    def no_broker(self) -> Unavailable:
        """The error for whoever waits for a session."""
        # `conductor up` would start another broker, with an address of its own.
        start = (
            "look at it on its host (`systemctl status vram-conductor-broker`, or start it with "
            "`conductor broker`) and at the network between"
            if self.endpoint.startswith("tcp://")
            else "start it with `conductor up`"
        )
        return Unavailable(
            "no_broker",
            f"no broker answers at {self.endpoint}; {start}, or name the right endpoint",
            retryable=True,
            endpoint=self.endpoint,
        )

    def heard(self, now_ns: int) -> None:
        if self._liveness is not None:
            self._liveness.heard(now_ns)

    def sent(self, now_ns: int) -> None:
        if self._liveness is not None:
            self._liveness.sent(now_ns)

    def ping_due(self, now_ns: int) -> bool:
        return self._liveness is not None and self._liveness.ping_due(now_ns)

    def dead(self, now_ns: int) -> bool:
        """The broker is silent for too long, although the connection seems to stand."""
        return self._liveness is not None and self._liveness.dead(now_ns)

    def expired(self, now_ns: int) -> bool:
        return self.phase is Phase.DIALLING and now_ns >= self._give_up_ns

    def redial_due(self, now_ns: int) -> bool:
        """Whether to open the next socket now; True once per ``broke``."""
        if self.phase is not Phase.DIALLING or self._redial_ns is None or now_ns < self._redial_ns:
            return False
        self._redial_ns = None
        self._suspect = None
        return True

    def next_ns(self) -> int | None:
        """When to look again at the latest."""
        if self.phase is Phase.DIALLING:
            return min(self._give_up_ns, self._redial_ns or self._give_up_ns)
        if self.phase is Phase.OPEN and self._liveness is not None:
            return self._liveness.next_ns()
        return None
