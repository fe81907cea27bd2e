"""One engine step: one batch of one pool, then a token for each job that is due."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vram_conductor.protocol.commands import RunTokens
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.job import Job, Receipt
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import PoolState, Residency

log = logging.getLogger(__name__)

Share = tuple[Job, int]
"""A job and how many of its pending tokens go into a batch."""


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


class Steps:
    """Runs the jobs that are in slots.

    Attributes:
        count: steps done; the shell's watchdog looks at it.
    """

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        mover: Mover,
        parking: Parking,
        ends: Ends,
        outbox: Outbox,
        clock: Callable[[], int],
        batch_tokens: int,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._mover = mover
        self._parking = parking
        self._ends = ends
        self._outbox = outbox
        self._clock = clock
        self._batch_tokens = batch_tokens
        self._turn: dict[str, int] = {}
        self.count = 0

    def step(self, now_ns: int) -> bool:
        """Compute one batch; False if no job is in a slot."""
        pool = self._next_pool()
        if pool is None or pool.handle is None:
            return False
        self.count += 1
        self._turn[pool.key] = self.count
        shares = compose([slot.job for slot in pool.slots if slot.job], self._batch_tokens)
        begin = self._clock()
        try:
            pool.handle.decode([_entry(job, count) for job, count in shares])
        except Exception as error:
            self._decode_failed(pool, shares, error)
            return True
        self._note(shares, (self._clock() - begin) / 1e6, now_ns)
        due = [job for job, _ in shares if job.pending == 0]
        spoilt = [job for job in due if not self._sample(pool, job)]
        if spoilt:
            # What is no number spreads through masked cells, too: nobody goes on in this cache.
            # States of others were computed before and are right.
            self._mover.close_pool(pool, Receipt())
        return True

    def _next_pool(self) -> PoolState | None:
        """Pools on stage take turns, step by step."""
        running = {job.pool.key: job.pool for job in self._jobs.running()}
        if not running:
            return None
        return running[min(running, key=lambda key: self._turn.get(key, 0))]

    def _note(self, shares: Sequence[Share], elapsed_ms: float, now_ns: int) -> None:
        for job, count in shares:
            slot, paper = job.slot, job.receipt
            assert slot is not None
            held = len(slot.tape)
            slot.tape.extend(job.work.view(held, held + count))
            slot.clean = False
            job.alone = False
            job.settling = job.catching_up and job.pending > 0
            if job.catching_up and not job.settling:
                # What had to be computed again is a price of the swap.
                job.catching_up = False
                assert job.placed_ns is not None
                job.pool.note_swap((self._clock() - job.placed_ns) / 1e6)
            if job.generated and count == 1:
                paper.decode_ms += elapsed_ms
            else:
                paper.prefill_ms += elapsed_ms
            job.pool.used_ns = job.pool.weights.used_ns = slot.used_ns = now_ns

    def _sample(self, pool: PoolState, job: Job) -> bool:
        """One token for a job. False: its cache is spoilt."""
        model = pool.weights.handle
        assert pool.handle is not None
        assert job.slot is not None
        assert job.sampler is not None
        assert model is not None
        try:
            token = pool.handle.sample(job.slot.index, job.sampler)
            is_end = model.is_eog(token)
            piece = b"" if is_end else model.piece(token, special=False)
        except Exception as error:
            spoilt = isinstance(error, ConductorError) and error.reason == "bad_logits"
            if spoilt:
                # Not to be parked; the state that was parked before is of an older cache.
                self._leave(pool, job, "bad_logits")
            self._ends.failed(job, error)
            return not spoilt
        self._take(job, token)
        if is_end:
            self._ends.done(job, "eos", ids=[token])
            return True
        text = job.text.push(piece)
        self._outbox.reply(RunTokens, job.run, job=job.run.job, text=text, ids=[token])
        limit = job.run.max_tokens
        if job.text.stopped_by is not None:
            self._ends.done(job, "stop")
        elif (limit is not None and job.generated >= limit) or len(job.work) >= job.n_ctx:
            self._ends.done(job, "length")
        return True

    def _take(self, job: Job, token: int) -> None:
        """The first token commits the conversation to the prompt; every one is part of it."""
        transcript = job.conversation.transcript
        if not job.committed:
            job.committed = True
            transcript.replace(job.work.view(), job.run.version + 1)
        job.generated += 1
        job.work.append(token)
        transcript.append(token)

    # --- failures -----------------------------------------------------------------------------

    def _decode_failed(self, pool: PoolState, shares: Sequence[Share], error: Exception) -> None:
        if isinstance(error, ConductorError) and error.reason == "kv_full":
            self._pool_full(pool, shares, error)
            return
        log.error("a decode of %s failed: %s", pool.key, info_of(error).message, exc_info=error)
        for job, _ in shares:
            # What these slots hold now is unknown; the checkpoints are not touched.
            self._leave(pool, job, "decode_failed")
            job.alone = True
            if len(shares) == 1:
                self._ends.failed(job, error)

    def _leave(self, pool: PoolState, job: Job, lost: str) -> None:
        slot = job.slot
        assert slot is not None
        job.leave_slot(job.waiting_ns, front=True)
        self._parking.release(pool, slot)
        job.conversation.lost = lost

    def _pool_full(self, pool: PoolState, shares: Sequence[Share], error: ConductorError) -> None:
        """No cells: idle conversations leave first, then the job that came last; the last one
        left has overflowed by itself."""
        idle = [slot for slot in pool.slots if slot.conversation and not slot.job]
        if idle:
            slot = min(idle, key=lambda slot: slot.used_ns)
            self._mover.empty(pool, slot, Receipt())
            return
        running = [slot for slot in pool.slots if slot.job]
        if len(running) > 1:
            slot = max(running, key=lambda slot: slot.job.seq if slot.job else 0)
            assert slot.job is not None
            slot.job.spreads = True
            self._mover.empty(pool, slot, Receipt())
            return
        self._ends.failed(shares[0][0], error)


def _entry(job: Job, count: int) -> tuple[int, Tokens, int, bool]:
    assert job.slot is not None
    held = len(job.slot.tape)
    ids = job.work.view(held, held + count)
    return job.slot.index, ids, held, count == job.pending
