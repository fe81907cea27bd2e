"""The worker's jobs: all that have not ended. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterator

from vram_conductor.protocol.values import AgentKey, ConversationKey
from vram_conductor.worker.job import Job


class Jobs:
    """Jobs by (broker_epoch, op); at most one per conversation.

    Attributes:
        revision: counts arrivals and ends.
    """

    def __init__(self) -> None:
        self._by_op: dict[tuple[int, int], Job] = {}
        self._seq = 0
        self.revision = 0

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._by_op.values()))

    def __len__(self) -> int:
        return len(self._by_op)

    def next_seq(self) -> int:
        """A number for a new job."""
        self._seq += 1
        return self._seq

    def add(self, job: Job) -> None:
        """Note a new job."""
        self._by_op[job.run.broker_epoch, job.run.op] = job
        self.revision += 1

    def remove(self, job: Job) -> None:
        """Forget one that has ended."""
        self._by_op.pop((job.run.broker_epoch, job.run.op), None)
        self.revision += 1

    def find(self, broker_epoch: int, op: int) -> Job | None:
        """The job of a RUN command."""
        return self._by_op.get((broker_epoch, op))

    def of_conversation(self, key: ConversationKey) -> Job | None:
        """The job that a conversation has."""
        return next((job for job in self._by_op.values() if job.conversation.key == key), None)

    def of_agent(self, key: AgentKey) -> list[Job]:
        """An agent's jobs."""
        return [job for job in self._by_op.values() if job.agent.key == key]

    def in_pool(self, key: str) -> list[Job]:
        """A pool's jobs, running or waiting."""
        return [job for job in self._by_op.values() if job.pool.key == key]

    def waiting(self) -> list[Job]:
        """Jobs without a slot."""
        return [job for job in self._by_op.values() if job.slot is None]

    def running(self) -> list[Job]:
        """Jobs in a slot."""
        return [job for job in self._by_op.values() if job.slot is not None]
