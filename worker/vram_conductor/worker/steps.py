"""What is computed next: composes batches of the jobs in slots and begins them.

Without lanes of their own the pools take turns, one batch a step; with them every pool that is free
gets its next batch as soon as the last one is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vram_conductor.worker.engine import Pool, Sampler, Tokens
from vram_conductor.worker.finishing import Finishing, Share
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.lane import Errand
from vram_conductor.worker.residency import PoolState
from vram_conductor.worker.traffic import Traffic


def compose(jobs: Sequence[Job], batch_tokens: int) -> list[Share]:
    """The next batch of a pool: one token for each job that generates, then prompts in order of
    arrival as far as the micro-batch goes. A job whose batches fail runs alone."""
    alone = [job for job in jobs if job.alone]
    if alone:
        return [(alone[0], min(alone[0].pending, batch_tokens))]
    room = batch_tokens
    shares = []
    for job in sorted(jobs, key=lambda job: (job.pending > 1, job.seq)):
        count = min(job.pending, room)
        if count:
            shares.append((job, count))
            room -= count
    return shares


class Submission(Errand):
    """One batch, and a token for each job that is due after it.

    Attributes:
        tokens: for each due job, by ``seq``: its token, or why there is none.
        elapsed_ms: what computing the batch took.
    """

    def __init__(
        self,
        pool: PoolState,
        handle: Pool,
        shares: list[Share],
        clock: Callable[[], int],
        finishing: Finishing,
        now_ns: int,
    ) -> None:
        super().__init__(pool.key)
        self.pool = pool
        self.shares = shares
        self.now_ns = now_ns
        self.elapsed_ms = 0.0
        self.tokens: dict[int, int | Exception] = {}
        self._handle = handle
        self._clock = clock
        self._finishing = finishing
        self._batch = [_entry(job, count) for job, count in shares]
        self._due = [_due(job) for job, count in shares if count == job.pending]

    def do(self) -> None:
        begin = self._clock()
        self._handle.decode(self._batch)
        self.elapsed_ms = (self._clock() - begin) / 1e6
        for seq, slot, sampler in self._due:
            try:
                self.tokens[seq] = self._handle.sample(slot, sampler)
            except Exception as error:
                self.tokens[seq] = error

    def finish(self) -> None:
        if self.error is not None:
            self._finishing.failed(self.pool, self.shares, self.error)
        else:
            self._finishing.computed(
                self.pool, self.shares, self.tokens, self.elapsed_ms, self.now_ns
            )


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
        assert pool.handle is not None
        jobs = [slot.job for slot in pool.slots if slot.job and slot.job.verdict is None]
        shares = compose(jobs, self._batch_tokens)
        self._begun += 1
        self._turn[pool.key] = self._begun
        self._traffic.begin(
            Submission(pool, pool.handle, shares, self._clock, self._finishing, now_ns)
        )


def _entry(job: Job, count: int) -> tuple[int, Tokens, int, bool]:
    assert job.slot is not None
    held = len(job.slot.tape)
    ids = job.work.view(held, held + count)
    return job.slot.index, ids, held, count == job.pending


def _due(job: Job) -> tuple[int, int, Sampler]:
    assert job.slot is not None
    assert job.sampler is not None
    return job.seq, job.slot.index, job.sampler
