"""REGISTERs that wait for a worker (*pure*): right after the start, or while one is restarted.

Nothing has been promised to them and nothing done for them; when a worker comes, each is asked
again as if it had just arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.protocol.errors import ErrorInfo, ResourceExhausted, error_from_info
from vram_conductor.protocol.messages import Progress, Register
from vram_conductor.protocol.values import AgentKey

GUESTS_MAX = 1_024
"""REGISTERs that may wait for a worker, over all clients."""

WAITERS_MAX = 256
"""Requests that may wait for one and the same agent or lease."""

Who = tuple[bytes, bytes]
"""(peer, rid) of a REGISTER."""


def check_waiters(what: str, waiters: int) -> None:
    """Raises ResourceExhausted ``too_many_waiters`` if so many wait that one more is too many."""
    if waiters >= WAITERS_MAX:
        raise ResourceExhausted(
            "too_many_waiters",
            f"{waiters} requests wait for {what} already; wait for the answer of an earlier one",
            retryable=True,
            limit=WAITERS_MAX,
        )


@dataclass(frozen=True, slots=True)
class Guest:
    """One REGISTER that waits.

    Attributes:
        key: the agent that it is about.
        devices: which will do; empty: any.
        again: it was being carried out when the worker was lost; that is done once only.
    """

    peer: bytes
    key: AgentKey
    message: Register
    devices: tuple[str, ...]
    again: bool


class Lobby:
    """All REGISTERs that wait, in order of arrival."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._guests: dict[Who, Guest] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def __iter__(self) -> Iterator[Guest]:
        return iter(self._guests.values())

    @property
    def open(self) -> bool:
        """Whether the configuration lets anybody wait."""
        return self._state.config.broker.worker_wait_ms > 0

    def wait(self, guest: Guest) -> None:
        """Let a REGISTER wait for one of its devices' workers; asking twice is asking once.

        Raises Unavailable ``no_worker`` (waiting is switched off), ResourceExhausted
        ``too_many_waiters``.
        """
        state, who = self._state, (guest.peer, guest.message.rid)
        if who in self._guests:
            return
        if not self.open:
            raise error_from_info(no_worker(state, *guest.devices))
        if len(self._guests) >= GUESTS_MAX:
            raise ResourceExhausted(
                "too_many_waiters",
                f"{GUESTS_MAX} requests wait for a worker already; start it, then try again",
                retryable=True,
                limit=GUESTS_MAX,
            )
        self._guests[who] = guest
        until_ns = self._until_ns(guest)
        state.timers.set(("guest", who), until_ns)
        wait_ms = (until_ns - state.now_ns) // MS
        names = ", ".join(guest.devices) or "any device"
        note = f"waiting for the worker of {names}, up to {wait_ms / 1000:g} s"
        state.to_client(guest.peer, Progress(rid=guest.message.rid, stage="worker", note=note))

    def call(self, device: str) -> list[Guest]:
        """The device has a worker: take out everybody whom it may serve."""
        return self._take(lambda guest: not guest.devices or device in guest.devices)

    def turn_away(self, error: ErrorInfo, key: AgentKey | None = None) -> bool:
        """End the waiting of everybody, or of those who want one agent, with an error. False if
        there was nobody."""
        gone = self._take(lambda guest: key is None or guest.key == key)
        for guest in gone:
            self._state.fail(guest.peer, guest.message.rid, error)
        return bool(gone)

    def cancel(self, principal: str, rid: bytes, error: ErrorInfo) -> bool:
        """CANCEL by rid. False if none of the principal's has it."""
        gone = self._take(lambda g: (g.key.principal, g.message.rid) == (principal, rid))
        for guest in gone:
            self._state.fail(guest.peer, rid, error)
        return bool(gone)

    def client_left(self, peer: bytes) -> None:
        """A session has ended, and nothing of what it asked for has begun."""
        self._take(lambda guest: guest.peer == peer)

    def expire(self, peer: bytes, rid: bytes) -> None:
        """A guest has waited for long enough."""
        guest = self._guests.pop((peer, rid))
        self._state.fail(peer, rid, no_worker(self._state, *guest.devices))

    def _until_ns(self, guest: Guest) -> int:
        """As configured, or until the time that was given to a worker's successor is over."""
        state = self._state
        held = (state.devices[name].hold_until_ns for name in guest.devices)
        return max(state.in_ms(state.config.broker.worker_wait_ms), *held, 0)

    def _take(self, wanted: Callable[[Guest], bool]) -> list[Guest]:
        found = [who for who, guest in self._guests.items() if wanted(guest)]
        for who in found:
            self._state.timers.cancel(("guest", who))
        return [self._guests.pop(who) for who in found]
