"""Jobs that wait at the broker (*pure*): bounded, first in first out per conversation.

The worker orders what it has; this queue only decides which job leaves next for a device whose
worker has room. One job of a conversation is under way at a time, so only the head of a
conversation's line is a candidate; among the heads the highest priority wins, and waiting raises
it, so that a stream of important jobs cannot starve the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.protocol.values import AgentKey, ConversationKey

AGING_NS = 5_000_000_000
"""Waiting this long is worth one step of priority."""

QUEUED_BYTES_MAX = 256 * 1024 * 1024
"""Requests that wait, over all agents: prompts may be large."""


class Waiting(Protocol):
    """What the queue needs to know of a job."""

    @property
    def job(self) -> int: ...
    @property
    def key(self) -> ConversationKey: ...
    @property
    def device(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def received_ns(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


J = TypeVar("J", bound=Waiting)


class JobQueue(Generic[J]):
    """Lines of waiting jobs, one per conversation.

    Args:
        jobs_max: bound over all agents.
        per_agent_max: bound of one agent.
    """

    def __init__(self, jobs_max: int, per_agent_max: int) -> None:
        self.jobs_max = jobs_max
        self.per_agent_max = per_agent_max
        self._lines: dict[str, dict[ConversationKey, deque[J]]] = {}
        self._of_agent: dict[AgentKey, int] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[J]:
        for lines in self._lines.values():
            for line in lines.values():
                yield from line

    def count(self, agent: AgentKey) -> int:
        """Waiting jobs of one agent."""
        return self._of_agent.get(agent, 0)

    def count_of(self, principal: str) -> int:
        """Waiting jobs of one principal."""
        return sum(n for agent, n in self._of_agent.items() if agent.principal == principal)

    def waiting(self, device: str) -> int:
        """Waiting jobs of one device."""
        return sum(len(line) for line in self._lines.get(device, {}).values())

    def check_room(self, agent: AgentKey, size_bytes: int, retry_after_ms: int) -> None:
        """Raises ResourceExhausted ``queue_full`` if one more job would exceed a bound."""
        for what, unit, count, more, limit in (
            (f"agent {agent.agent!r} has", "jobs", self.count(agent), 1, self.per_agent_max),
            ("the broker has", "jobs", self._count, 1, self.jobs_max),
            ("the broker has", "bytes", self._bytes, size_bytes, QUEUED_BYTES_MAX),
        ):
            if count + more > limit:
                raise ResourceExhausted(
                    "queue_full",
                    f"{what} {count} waiting {unit}, the limit is {limit}; "
                    f"try again in {retry_after_ms} ms",
                    retryable=True,
                    retry_after_ms=retry_after_ms,
                    queued=count,
                    limit=limit,
                )

    def push(self, job: J, *, front: bool = False) -> None:
        """Add a job at the end of its conversation's line; ``front`` for one that was under way
        already (a retry), which may exceed the bounds."""
        line = self._lines.setdefault(job.device, {}).setdefault(job.key, deque())
        if front:
            line.appendleft(job)
        else:
            line.append(job)
        self._count += 1
        self._bytes += job.size_bytes
        agent = job.key.agent_key
        self._of_agent[agent] = self._of_agent.get(agent, 0) + 1

    def remove(self, job: J) -> None:
        """Take a job out, wherever it stands."""
        lines = self._lines[job.device]
        line = lines[job.key]
        line.remove(job)
        if not line:
            del lines[job.key]
        if not lines:
            del self._lines[job.device]
        self._count -= 1
        self._bytes -= job.size_bytes
        agent = job.key.agent_key
        self._of_agent[agent] -= 1
        if not self._of_agent[agent]:
            del self._of_agent[agent]

    def next(self, device: str, ready: Callable[[J], bool], now_ns: int) -> J | None:
        """The head that should leave next, among those that are ``ready``; it stays queued."""
        best: J | None = None
        best_rank = (0.0, 0, 0)
        for line in self._lines.get(device, {}).values():
            head = line[0]
            if not ready(head):
                continue
            aged = head.priority + (now_ns - head.received_ns) / AGING_NS
            rank = (-aged, head.received_ns, head.job)
            if best is None or rank < best_rank:
                best, best_rank = head, rank
        return best
