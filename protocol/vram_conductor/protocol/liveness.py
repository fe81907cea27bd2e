"""Heartbeat bookkeeping for one peer. *Pure.*

Any traffic counts as life. The connecting side (client, worker) asks ``ping_due``; both sides
ask ``dead``. Read all pending messages before asking: silence that we did not listen to is none.
"""

from __future__ import annotations

from vram_conductor.protocol import limits


class Liveness:
    """Is the peer alive, and is it time to say that we are?

    Args:
        now_ns: monotonic clock now.
        heartbeat_ms: the interval (WELCOME.heartbeat_ms).
        missed_max: so many silent intervals in a row mean dead.
    """

    def __init__(
        self,
        now_ns: int,
        heartbeat_ms: int = limits.HEARTBEAT_MS,
        missed_max: int = limits.MISSED_HEARTBEATS_MAX,
    ) -> None:
        raise NotImplementedError

    def heard(self, now_ns: int) -> None:
        """Something arrived from the peer."""
        raise NotImplementedError

    def sent(self, now_ns: int) -> None:
        """Something was sent to the peer."""
        raise NotImplementedError

    def ping_due(self, now_ns: int) -> bool:
        """Whether to send a PING now; True counts as sent."""
        raise NotImplementedError

    def dead(self, now_ns: int) -> bool:
        """Whether the peer is silent for too long. A pause of our own (the process was stopped
        or starved) is forgiven once per silence."""
        raise NotImplementedError

    def silent_ms(self, now_ns: int) -> int:
        """For how long nothing was heard."""
        raise NotImplementedError

    def next_ns(self) -> int:
        """When to ask again at the latest (for the poll timeout)."""
        raise NotImplementedError
