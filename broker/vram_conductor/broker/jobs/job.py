"""Jobs (*pure*): what a DECODE becomes, its attempts, and the table of those still known.

A job has exactly one terminal message. After it, its output is kept for a while so that a client
that lost the connection can still fetch it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.messages import Decode, Done, Error
from vram_conductor.protocol.stream import SendStream
from vram_conductor.protocol.values import ConversationKey

RESULTS_MAX = 4_096
"""Finished jobs kept for RESUME, over all clients; the oldest of whoever has most go first."""

RESULTS_BYTES_MAX = 256 * 1024 * 1024
"""Output of finished jobs kept for RESUME, over all clients; likewise."""

ATTEMPTS_MAX = 3
"""A job whose worker dies before any token got out starts again, this many times in all."""

JobState = Literal["queued", "sent", "running", "ended"]


@dataclass(slots=True)
class Attempt:
    """One RUN. What it produced becomes the record when it ends.

    Attributes:
        op: identifies the attempt in all that comes back.
        version: the conversation's version that it started from.
        known: whether the RUN relied on the worker's own copy of the transcript.
        keep: tokens of the transcript that stay (STARTED).
        prompt: the new prompt's ids (STARTED), int32 LE.
        generated: ids so far, int32 LE.
        said: their text, in pieces.
        cancelled: CANCEL_RUN was sent.
    """

    op: int
    version: int
    known: bool
    keep: int = 0
    prompt: bytes = b""
    generated: bytearray = field(default_factory=bytearray)
    said: list[str] = field(default_factory=list)
    cancelled: bool = False

    @property
    def generated_tokens(self) -> int:
        return len(self.generated) // 4


@dataclass(slots=True, eq=False)
class Job:
    """One DECODE.

    Attributes:
        job: the number by which the broker knows it. ``number``: the one that others are told; it
            counts the jobs of its principal, so that nobody learns how many the others send.
        message: the request; dropped when the job ends. ``size_bytes`` is its length on the wire.
        digest: of the request, to recognise the same one again.
        peer: the client's connection, None while there is none.
        lost: attempts that ended with their worker.
        stopping: why it is being stopped; becomes the terminal message unless the job finishes
            first. None while nobody wants it stopped.
        cut: the output outgrew the stream's bound.
        terminal: DONE or ERROR, once.
    """

    job: int
    rid: bytes
    principal: str
    key: ConversationKey
    device: str
    priority: int
    message: Decode | None
    size_bytes: int
    digest: bytes
    stream: SendStream
    peer: bytes | None
    detach: bool
    received_ns: int
    queue_deadline_ns: int | None
    deadline_ns: int | None
    number: int = 0
    state: JobState = "queued"
    attempt: Attempt | None = None
    lost: int = 0
    stopping: ErrorInfo | None = None
    cut: bool = False
    started_ns: int | None = None
    first_token_ns: int | None = None
    terminal: Done | Error | None = None


class JobTable:
    """Every job that is not forgotten, by number and by (principal, rid)."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._by_rid: dict[tuple[str, bytes], int] = {}
        self._counts: dict[str, int] = {}
        self._ended: dict[str, dict[int, int]] = {}
        """By principal: bytes kept of each finished job, oldest first."""
        self._count: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._last = 0
        self.done = 0
        self.failed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def live(self) -> Iterator[Job]:
        """The jobs without a terminal message yet."""
        return (job for job in self._jobs.values() if job.state != "ended")

    def next_number(self) -> int:
        self._last += 1
        return self._last

    def find(self, job: int) -> Job | None:
        return self._jobs.get(job)

    def by_rid(self, principal: str, rid: bytes) -> Job | None:
        number = self._by_rid.get((principal, rid))
        return None if number is None else self._jobs[number]

    def add(self, job: Job) -> None:
        """Take a new job in, and number it."""
        job.number = self._counts[job.principal] = self._counts.get(job.principal, 0) + 1
        self._jobs[job.job] = job
        self._by_rid[job.principal, job.rid] = job.job

    def ended(self, job: Job) -> list[Job]:
        """Account for a job's end. Returns the older results to forget for it."""
        if isinstance(job.terminal, Done):
            self.done += 1
        else:
            self.failed += 1
        whose, size = job.principal, job.stream.kept_bytes
        self._ended.setdefault(whose, {})[job.job] = size
        self._count[whose] += 1
        self._bytes[whose] += size
        return self._surplus()

    def forget(self, job: Job) -> None:
        """Drop a finished job. Idempotent."""
        if self._jobs.pop(job.job, None) is None:
            return
        whose = job.principal
        del self._by_rid[whose, job.rid]
        self._bytes[whose] -= self._ended[whose].pop(job.job)
        self._count[whose] -= 1
        if not self._ended[whose]:
            del self._ended[whose], self._bytes[whose], self._count[whose]

    def _surplus(self) -> list[Job]:
        """What is beyond the bounds: the oldest of whoever has most, so that nobody's flood of
        jobs costs the others what they have not fetched yet."""
        count, size = self._count.total(), self._bytes.total()
        if count <= RESULTS_MAX and size <= RESULTS_BYTES_MAX:
            return []
        counts, sizes = self._count.copy(), self._bytes.copy()
        oldest = {whose: iter(ended.items()) for whose, ended in self._ended.items()}
        victims: list[Job] = []
        while count > RESULTS_MAX or size > RESULTS_BYTES_MAX:
            held = counts if count > RESULTS_MAX else sizes
            whose = max(held, key=held.__getitem__)
            number, its_bytes = next(oldest[whose])
            victims.append(self._jobs[number])
            counts[whose] -= 1
            sizes[whose] -= its_bytes
            count, size = count - 1, size - its_bytes
        return victims


def wait_ns(received_ns: int, after_ms: int | None) -> int | None:
    """A relative deadline as a moment of our clock."""
    return None if after_ms is None else received_ns + after_ms * 1_000_000
