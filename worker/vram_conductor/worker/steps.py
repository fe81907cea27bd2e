"""What is computed next: composes batches of the jobs in slots and begins them.

Without lanes of their own the pools take turns, one batch a step; with them every pool that is free
gets its next batch as soon as the last one is finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vram_conductor.worker.engine import Sampler, Tokens
from vram_conductor.worker.finishing import Finishing, Result, Share
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.lane import Errand, Report
from vram_conductor.worker.residency import PoolState
from vram_conductor.worker.traffic import Traffic

Entry = tuple[int, Tokens, int, bool]
"""Slot, ids, first position, whether a token is wanted: see ``engine.Pool.decode``."""


def compose(jobs: Sequence[Job], batch_tokens: int) -> list[Share]:
    """The next batch of a pool: one token for each job that generates, then prompts in order of
    arrival as far as the micro-batch goes. A job whose batches fail runs alone."""
    alone = [job for job in jobs if job.alone]
    if alone:
        return [(alone[0], min(alone[0].pending, batch_tokens))]
    room = batch_tokens
    shares: list[tuple[Job, int]] = []
    for job in sorted(jobs, key=lambda job: (job.pending > 1, job.seq)):
        count = min(job.pending, room)
        if count:
            shares.append((job, count))
            room -= count
    return shares


@dataclass(frozen=True)
class _Due:
    """A job that gets a token, and its place in the cache."""

    seq: int
    slot: int
    sampler: Sampler


class Submission(Errand):
    """One batch, and a token for each job that is due after it.

    Where all that the jobs want is their next token, the lane goes on with that by itself, for a
    few ``rounds``: the device computes while the engine thread still draws its conclusions. No job
    may end within them but by the end token, which the lane sees, too.
    """

    def __init__(
        self,
        pool: PoolState,
        shares: list[Share],
        rounds: int,
        clock: Callable[[], int],
        finishing: Finishing,
        now_ns: int,
    ) -> None:
        super().__init__(pool.key)
        assert pool.handle is not None
        assert pool.weights.handle is not None
        self._pool, self._shares = pool, shares
        self._handle, self._model = pool.handle, pool.weights.handle
        self._rounds = rounds
        self._now_ns = now_ns
        self._clock = clock
        self._finishing = finishing
        self._batch = [_entry(job, count) for job, count in shares]
        self._due = [_due(job) for job, count in shares if count == job.pending]
        self._results: deque[Result] = deque()
        self._last: Result | None = None

    def do(self, report: Report) -> None:
        began_ns, batch = self._now_ns, self._batch
        while True:
            result = self._compute(batch, began_ns)
            self._rounds -= 1
            if self._rounds < 1 or self.stop or not self._goes_on(result.tokens):
                self._last = result
                return
            tokens = result.tokens
            self._results.append(result)
            report(self)
            began_ns = self._clock()
            batch = [
                (slot, np.array([tokens[due.seq]], np.int32), first + len(ids), True)
                for due, (slot, ids, first, _) in zip(self._due, batch, strict=True)
            ]

    def _compute(self, batch: Sequence[Entry], began_ns: int) -> Result:
        begin = self._clock()
        self._handle.decode(batch)
        elapsed_ms = (self._clock() - begin) / 1e6
        tokens: dict[int, int | Exception] = {}
        for due in self._due:
            try:
                tokens[due.seq] = self._handle.sample(due.slot, due.sampler)
            except Exception as error:
                tokens[due.seq] = error
        return Result(tokens, elapsed_ms, began_ns)

    def _goes_on(self, tokens: dict[int, int | Exception]) -> bool:
        return all(
            isinstance(token, int) and not self._model.is_eog(token) for token in tokens.values()
        )

    def finish(self, *, over: bool) -> None:
        while self._results:
            self._take(self._results.popleft(), last=False)
        if over and self._last is not None:
            last, self._last = self._last, None
            self._take(last, last=True)
        if over and self.error is not None:
            error, self.error = self.error, None
            self._finishing.failed(self._pool, self._shares, error)

    def _take(self, result: Result, *, last: bool) -> None:
        self._finishing.computed(self._pool, self._shares, result, last=last)
        self._shares = [(job, 1) for job, _ in self._shares]


class Steps:
    """Keeps the jobs that are in slots going."""

    def __init__(
        self,
        jobs: Jobs,
        traffic: Traffic,
        finishing: Finishing,
        clock: Callable[[], int],
        batch_tokens: int,
    ) -> None:
        self._jobs = jobs
        self._traffic = traffic
        self._finishing = finishing
        self._clock = clock
        self._batch_tokens = batch_tokens
        self._turn: dict[str, int] = {}
        self._begun = 0

    def step(self, now_ns: int) -> bool:
        """Begin what can be begun; whether something was also finished, so that there is more."""
        pools = self._ready()
        if not self._traffic.parallel:
            del pools[1:]
        for pool in pools:
            self._begin(pool, now_ns)
        return bool(pools) and not self._traffic.parallel

    def _ready(self) -> list[PoolState]:
        """Pools that may get a batch, those first that have waited for the longest."""
        free = self._traffic.free
        running = {
            job.pool.key: job.pool
            for job in self._jobs.running()
            if job.verdict is None and free(job.pool.key)
        }
        if len(running) > 1:
            return [running[key] for key in sorted(running, key=lambda key: self._turn.get(key, 0))]
        return list(running.values())

    def _begin(self, pool: PoolState, now_ns: int) -> None:
        jobs = [slot.job for slot in pool.slots if slot.job and slot.job.verdict is None]
        shares = compose(jobs, self._batch_tokens)
        self._begun += 1
        self._turn[pool.key] = self._begun
        rounds = min(_rounds(shares, jobs), self._traffic.ahead)
        self._traffic.begin(Submission(pool, shares, rounds, self._clock, self._finishing, now_ns))


def _rounds(shares: Sequence[Share], jobs: Sequence[Job]) -> int:
    """For how many batches a lane may go on by itself: until the first job reaches its limit."""
    if len(shares) < len(jobs):
        return 1
    return min(_left(job, count) for job, count in shares)


def _left(job: Job, count: int) -> int:
    """How many tokens a job can get before it ends; 1 where only its text can tell, or where it
    is not due after ``count`` more."""
    if count < job.pending or job.run.stop or job.run.structured:
        return 1
    left = job.n_ctx - len(job.work)
    limit = job.run.max_tokens
    return left if limit is None else min(left, limit - job.generated)


def _entry(job: Job, count: int) -> Entry:
    assert job.slot is not None
    held = len(job.slot.tape)
    ids = job.work.view(held, held + count)
    return job.slot.index, ids, held, count == job.pending


def _due(job: Job) -> _Due:
    assert job.slot is not None
    assert job.sampler is not None
    return _Due(job.seq, job.slot.index, job.sampler)
