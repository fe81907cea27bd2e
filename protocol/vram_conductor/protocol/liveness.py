"""Heartbeat bookkeeping for one peer. *Pure.*

Any traffic counts as life. The connecting side (client, worker) asks ``ping_due``; both sides
ask ``dead``. Read all pending messages before asking: silence that we did not listen to is none.
"""

from __future__ import annotations

from vram_conductor.protocol import limits

OWN_PAUSE_INTERVALS = 2
"""Not asked for so many intervals: we were stopped or starved, and heard nothing for that."""


class Liveness:
    """Is the peer alive, and is it time to say that we are?

    Args:
        now_ns: monotonic clock now.
        heartbeat_ms: the interval (WELCOME.heartbeat_ms).
        missed_max: so many silent intervals in a row mean dead.
        pings: whether this side sends PINGs (the one that connected).
    """

    def __init__(
        self,
        now_ns: int,
        heartbeat_ms: int = limits.HEARTBEAT_MS,
        missed_max: int = limits.MISSED_HEARTBEATS_MAX,
        *,
        pings: bool = True,
    ) -> None:
        self._interval_ns = heartbeat_ms * 1_000_000
        self._patience_ns = self._interval_ns * missed_max
        self._pings = pings
        self._heard_ns = self._sent_ns = self._pinged_ns = self._asked_ns = now_ns
        self._deadline_ns = now_ns + self._patience_ns
        self._forgiven = False

    def heard(self, now_ns: int) -> None:
        """Something arrived from the peer."""
        self._heard_ns = now_ns
        self._deadline_ns = now_ns + self._patience_ns
        self._forgiven = False

    def sent(self, now_ns: int) -> None:
        """Something was sent to the peer."""
        self._sent_ns = now_ns

    def ping_due(self, now_ns: int) -> bool:
        """Whether to send a PING now; True counts as sent.

        It is due when we sent nothing for an interval (the peer must hear from us even while it
        talks to us), and when we heard nothing for one (PONG is the answer).
        """
        if not self._pings or now_ns < self._ping_ns():
            return False
        self._sent_ns = self._pinged_ns = now_ns
        return True

    def dead(self, now_ns: int) -> bool:
        """Whether the peer has been silent for too long.

        A pause of our own (the process was stopped or starved) is forgiven once per silence: the
        peer gets one more interval.
        """
        paused = now_ns - self._asked_ns >= OWN_PAUSE_INTERVALS * self._interval_ns
        self._asked_ns = now_ns
        if now_ns < self._deadline_ns:
            return False
        if paused and not self._forgiven:
            self._forgiven = True
            self._deadline_ns = now_ns + self._interval_ns
            return False
        return True

    def silent_ms(self, now_ns: int) -> int:
        """For how long nothing was heard."""
        return max(0, now_ns - self._heard_ns) // 1_000_000

    def next_ns(self) -> int:
        """When to ask again at the latest, for the poll timeout. Ask at least this often."""
        times = [self._asked_ns + self._interval_ns]
        if self._deadline_ns > self._asked_ns:
            times.append(self._deadline_ns)
        if self._pings:
            times.append(self._ping_ns())
        return min(times)

    def _ping_ns(self) -> int:
        idle = self._sent_ns + self._interval_ns
        quiet = max(self._heard_ns, self._pinged_ns) + self._interval_ns
        return min(idle, quiet)
