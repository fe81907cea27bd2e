"""What follows from a batch: tokens become text, jobs end, failures stay where they belong.

Engine thread only, as soon as the batch has come back; nothing is under way in its pool then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.health import Health
from vram_conductor.worker.job import Job, Receipt
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import PoolState
from vram_conductor.worker.streams import Streams

log = logging.getLogger(__name__)

Share = tuple[Job, int]
"""A job and how many of its pending tokens go into a batch."""


@dataclass(frozen=True)
class Result:
    """What came of one batch.

    Attributes:
        tokens: for each job that was due, by ``seq``: its token, or why there is none.
        elapsed_ms: what computing the batch took.
        began_ns: when it began.
    """

    tokens: dict[int, int | Exception]
    elapsed_ms: float
    began_ns: int


class Finishing:
    """Takes results.

    Attributes:
        count: batches that have come back.
    """

    def __init__(
        self,
        mover: Mover,
        parking: Parking,
        ends: Ends,
        streams: Streams,
        health: Health,
        clock: Callable[[], int],
    ) -> None:
        self._mover = mover
        self._parking = parking
        self._ends = ends
        self._streams = streams
        self._health = health
        self._clock = clock
        self.count = 0

    def computed(
        self, pool: PoolState, shares: Sequence[Share], result: Result, *, last: bool
    ) -> None:
        """A batch was computed. ``last``: nothing is under way in the pool; else the next one is,
        and whatever this one gave is in the cache already."""
        self.count += 1
        self._health.good()
        self._note(shares, result.elapsed_ms, result.began_ns)
        spoilt = False
        for job, _ in shares:
            token = result.tokens.get(job.seq)
            # Whoever was told to end meanwhile says nothing more than it must.
            if token is None or (last and job.verdict is not None):
                continue
            if isinstance(token, int):
                self._token(pool, job, token)
            else:
                spoilt = self._no_token(pool, job, token) or spoilt
        if spoilt:
            # What is no number spreads through masked cells, too: nobody goes on in this cache.
            # States of others were computed before and are right.
            self._mover.close_pool(pool, Receipt())

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

    def _token(self, pool: PoolState, job: Job, token: int) -> None:
        model = pool.weights.handle
        assert model is not None
        is_end = model.is_eog(token)
        piece = b"" if is_end else model.piece(token, special=False)
        self._take(job, token)
        if is_end:
            self._ends.done(job, "eos", ids=(token,))
            return
        text = job.text.push(piece)
        self._streams.push(job, text, token)
        limit = job.run.max_tokens
        if job.text.stopped_by is not None:
            self._ends.done(job, "stop")
        elif job.sampler is not None and job.sampler.finished:
            self._ends.done(job, "grammar")
        elif (limit is not None and job.generated >= limit) or len(job.work) >= job.n_ctx:
            self._ends.done(job, "length")

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

    def _no_token(self, pool: PoolState, job: Job, error: Exception) -> bool:
        """Sampling failed. Whether the pool's cache is spoilt."""
        spoilt = isinstance(error, ConductorError) and error.reason == "bad_logits"
        if spoilt:
            # Not to be parked; the state that was parked before is of an older cache.
            self._leave(pool, job, "bad_logits")
        self._ends.failed(job, error)
        return spoilt

    def failed(self, pool: PoolState, shares: Sequence[Share], error: Exception) -> None:
        """A batch was not computed. A job that fails alone, twice in a row, ends with it."""
        self.count += 1
        if isinstance(error, ConductorError) and error.reason == "kv_full":
            self._pool_full(pool, shares, error)
            return
        log.error("a decode of %s failed: %s", pool.key, info_of(error).message, exc_info=error)
        self._health.failed([job.seq for job, _ in shares])
        for job, _ in shares:
            # What these slots hold now is unknown; the checkpoints are not touched.
            self._leave(pool, job, "decode_failed")
            if job.alone and not self._health.broken:
                self._ends.failed(job, error)
            job.alone = True

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
