"""Agents that nobody wants any more (*pure*): when one goes, and a record of those that went."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from vram_conductor.protocol.status import SweepReason, SweepStatus, SweptStatus
from vram_conductor.protocol.values import AgentKey

SECOND_NS = 1_000_000_000
KEPT = 256
"""Sweeps that are remembered, of all principals."""

SHOWN = 16


@dataclass(frozen=True, slots=True)
class Swept:
    """An agent that was removed, and why."""

    agent: AgentKey
    device: str
    reason: SweepReason
    at_ns: int


class SweepLog:
    """Counts every sweep, and remembers the last ones."""

    def __init__(self) -> None:
        self._counts: Counter[SweepReason] = Counter()
        self._last: deque[Swept] = deque(maxlen=KEPT)

    def note(self, swept: Swept) -> None:
        self._counts[swept.reason] += 1
        self._last.append(swept)

    def status(self, now_ns: int, principal: str | None) -> SweepStatus:
        """For STATUS. ``principal``: whose agents are named; None: everybody's."""
        mine = [
            swept for swept in reversed(self._last) if principal in (None, swept.agent.principal)
        ]
        return SweepStatus(
            session_ended=self._counts["session_ended"],
            not_back=self._counts["not_back"],
            idle=self._counts["idle"],
            last=[
                SweptStatus(
                    principal=swept.agent.principal,
                    agent=swept.agent.agent,
                    device=swept.device,
                    reason=swept.reason,
                    age_ms=(now_ns - swept.at_ns) // 1_000_000,
                )
                for swept in mine[:SHOWN]
            ],
        )


def idle_due_ns(ttl_s: int | None, used_ns: int, now_ns: int, *, busy: bool) -> int | None:
    """When an agent has been idle for too long; None: never. What is busy is being used now."""
    if ttl_s is None:
        return None
    return (now_ns if busy else used_ns) + ttl_s * SECOND_NS


def used_ns_of(used_unix_ns: int | None, now_ns: int, now_unix_ns: int) -> int:
    """When an agent was used, on the clock of a new broker; the time of day may have been set
    back meanwhile.

    Args:
        used_unix_ns: by the time of day; None: nobody knows, and it counts from now on.
    """
    if used_unix_ns is None:
        return now_ns
    return now_ns - max(0, now_unix_ns - used_unix_ns)
