"""Gives waiting jobs their slot: asks the scheduler who, the planner how, and has it done."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.protocol.commands import Started
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import Outbox
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.planner import Blocked, Plan, Want, plan_seat
from vram_conductor.worker.preparing import Preparing
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.schedule import (
    JobView,
    StageView,
    frozen_jobs,
    frozen_pools,
    ranked,
)
from vram_conductor.worker.snapshot import world
from vram_conductor.worker.world import ClosePool, Drop, Park

RECHECK_NS = 10_000_000
"""Jobs for which there was no room are looked at again after this time, or on any change."""


class Turns:
    """Places jobs.

    Attributes:
        blocked: why the jobs that wait do so, by ``Job.seq``, as of the last round.
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
        preparing: Preparing,
        slice_ns: int,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._mover = mover
        self._parking = parking
        self._ends = ends
        self._outbox = outbox
        self._clock = clock
        self._preparing = preparing
        self._slice_ns = slice_ns
        self.blocked: dict[int, Blocked] = {}
        self._fruitless: tuple[int, int] | None = None
        self._again_ns = 0

    def place(self, now_ns: int) -> bool:
        """One round: every waiting job that can have a slot gets one. Whether any did."""
        self._end_stages()
        if self._fruitless == self._picture() and now_ns < self._again_ns:
            return False
        placed = self._round(now_ns)
        for job in self._jobs.waiting():
            job.front = False
        self._fruitless = None if placed else self._picture()
        self._again_ns = now_ns + RECHECK_NS
        return placed

    def _picture(self) -> tuple[int, int]:
        return self._jobs.revision, self._residency.revision

    def _round(self, now_ns: int) -> bool:
        self.blocked = {}
        tried: set[int] = set()
        full: set[str] = set()
        placed = short = False
        while (job := self._next(now_ns, tried)) is not None:
            tried.add(job.seq)
            if not self._may_move(job) or job.pool.key in full:
                continue
            outcome = self._plan(job, now_ns)
            if isinstance(outcome, Blocked):
                self.blocked[job.seq] = outcome
                # Nobody overtakes where that would make the first in line wait longer.
                if outcome.reason in ("slots", "cells"):
                    full.add(job.pool.key)
                short = short or outcome.reason == "bytes"
            elif not short or self._joins(job, outcome):
                placed = self._carry_out(job, outcome, now_ns) or placed
                # Whoever lost a slot to a pool's reopening may come back in this same round.
                tried -= {other.seq for other in self._jobs.waiting() if other.front}
        return placed

    def _may_move(self, job: Job) -> bool:
        """Whether things may be moved for it: it is prepared, or cannot be before its model is
        loaded."""
        return job.pool.weights.handle is None or self._preparing.ask(job)

    def _joins(self, job: Job, plan: Plan) -> bool:
        """Whether it only joins what is on stage anyway."""
        on_stage = job.pool.stage_ns is not None
        return on_stage and all(isinstance(move, Park | Drop) for move in plan.moves)

    def _next(self, now_ns: int, tried: set[int]) -> Job | None:
        by_seq = {job.seq: job for job in self._jobs.waiting() if job.seq not in tried}
        if not by_seq:
            return None
        best = ranked([job.view() for job in by_seq.values()], now_ns)[0]
        return by_seq[best.seq]

    def _end_stages(self) -> None:
        """A pool's time slice begins when it gets a job, and ends when it has none left."""
        wanted = {job.pool.key for job in self._jobs}
        for key, pool in self._residency.pools.items():
            if pool.handle is None or key not in wanted:
                pool.stage_ns = None

    def _plan(self, job: Job, now_ns: int) -> Plan | Blocked:
        waiter = job.view()
        views: list[JobView] = [other.view() for other in self._jobs]
        stages = {
            pool.key: StageView(pool.key, pool.stage_ns, pool.swap_ms)
            for pool in self._residency.pools.values()
            if pool.stage_ns is not None
        }
        snapshot = world(
            self._residency,
            self._jobs,
            now_ns,
            frozen_pools=frozen_pools(waiter, views, stages, now_ns, self._slice_ns),
            frozen_jobs=frozen_jobs(waiter, views, job.pool.swap_ms, now_ns, self._slice_ns),
        )
        return plan_seat(snapshot, Want(job.pool.key, job.conversation.key, job.cells))

    def _carry_out(self, job: Job, plan: Plan, now_ns: int) -> bool:
        stage_ns = job.pool.stage_ns
        begin = self._clock()
        try:
            reopened = ClosePool(job.pool.key) in plan.moves
            reopen = job.pool.key if reopened else ""
            self._mover.carry_out(plan.moves, job.receipt, reopen=reopen)
            # A pool that was only reopened keeps its time slice.
            job.pool.stage_ns = now_ns if stage_ns is None else stage_ns
            # Where that takes a while, the pool waits for it on its stage.
            ready = self._preparing.ask(job)
            restored = ready and self._seat(job, plan.slot, now_ns)
        except Exception as error:
            self._ends.failed(job, error)
            return True
        took_ms = (self._clock() - begin) / 1e6
        if not ready:
            job.bringing_ms += took_ms
        elif plan.moves or restored or job.bringing_ms:
            job.pool.note_swap(job.bringing_ms + took_ms)
            job.bringing_ms = 0.0
        self._residency.revision += 1
        return True

    def _seat(self, job: Job, index: int, now_ns: int) -> bool:
        """Put the conversation's KV into the slot, as far as there is any; say STARTED."""
        pool, conversation, paper = job.pool, job.conversation, job.receipt
        assert job.prompt is not None
        if conversation.pool is not None and conversation.slot and conversation.pool is not pool:
            self._parking.release(conversation.pool, conversation.slot)
        slot = pool.slots[index]
        had = job.held if job.seated_once else job.expected()
        begin = self._clock()
        reuse = self._parking.resume(conversation, pool, slot, job.work.view())
        if reuse.bytes:
            paper.moved_ms += (self._clock() - begin) / 1e6
            paper.moved_bytes += reuse.bytes
            self._mover.swaps += 1
        paper.restored = paper.restored or reuse.restored
        missing = max(0, had - reuse.tokens)
        if missing:
            paper.reprefilled_tokens += missing
            # A checkpoint that is right and too old: the worker died in the middle of an answer.
            reason = reuse.reason or "state_older"
            paper.reprefill_reason = paper.reprefill_reason or reason
        within = min(reuse.tokens, len(job.prompt.ids))
        paper.reused_tokens = min(paper.reused_tokens, within) if job.seated_once else within
        conversation.lost = ""
        job.slot, slot.job = slot, job
        job.placed_ns, job.front, job.seated_once = now_ns, False, True
        job.settling, job.catching_up = True, missing > 0
        slot.used_ns = conversation.used_ns = pool.used_ns = pool.weights.used_ns = now_ns
        self._announce(job)
        return reuse.restored

    def _announce(self, job: Job) -> None:
        if job.announced or job.prompt is None:
            return
        job.announced = True
        fresh = job.prompt.ids[job.prompt.keep :].astype("<i4")
        self._outbox.reply(
            Started,
            job.run,
            raw=fresh.tobytes(),
            job=job.run.job,
            keep=job.prompt.keep,
            prompt_tokens=len(job.prompt.ids),
        )
