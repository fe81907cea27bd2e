"""Gives waiting jobs their slot: asks the scheduler who, the planner how, and has it done.

What a plan touches must be quiet when it is carried out. So a plan is only a proposal as long as
a batch is under way there: its pools are held, and once they are quiet the round begins anew.
"""

from __future__ import annotations

from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
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
from vram_conductor.worker.seating import Seating
from vram_conductor.worker.snapshot import world
from vram_conductor.worker.traffic import Haul, Traffic
from vram_conductor.worker.world import Drop, Park

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
        preparing: Preparing,
        seating: Seating,
        traffic: Traffic,
        slice_ns: int,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._preparing = preparing
        self._seating = seating
        self._traffic = traffic
        self._slice_ns = slice_ns
        self.blocked: dict[int, Blocked] = {}
        self._fruitless: tuple[int, int] | None = None
        self._again_ns = 0
        self._interrupted = False
        self._beside_seen: tuple[int, int] | None = None

    def place(self, now_ns: int) -> bool:
        """One round: every waiting job that can have a slot gets one, as far as it goes without
        waiting for anything. Whether any did."""
        traffic = self._traffic
        if traffic.haul is not None:
            return self._beside(traffic.haul, now_ns)
        if traffic.rests or not traffic.quiet(traffic.held):
            return False
        self._end_stages()
        calm = not traffic.held and self._fruitless == self._picture()
        if (calm or self._seating.refused) and now_ns < self._again_ns:
            return False
        self._interrupted = self._seating.refused = False
        placed = self._round(now_ns)
        if not self._interrupted:
            traffic.hold(())
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
        while not self._interrupted and (job := self._next(now_ns, tried)) is not None:
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

    def _carry_out(self, job: Job, plan: Plan, now_ns: int) -> bool:
        """Have a plan carried out; False, and its pools are held, if something is in its way."""
        traffic = self._traffic
        pools, _ = self._seating.touches(job, plan)
        if not traffic.quiet(pools):
            # Whatever is held stays so: plans that change from round to round end there, too.
            traffic.hold(traffic.held | pools)
            self._interrupted = True
            return False
        self._seating.begin(job, plan, now_ns)
        if traffic.haul is not None:
            traffic.hold(())
        self._interrupted = traffic.haul is not None or self._seating.refused
        return True

    def _beside(self, haul: Haul, now_ns: int) -> bool:
        """While others are moved: a job whose KV is in its slot, or that has none, need not wait.
        Nothing is taken from anybody for it."""
        traffic = self._traffic
        picture = self._jobs.revision, haul.serial
        if picture == self._beside_seen and not traffic.held:
            return False
        self._beside_seen = picture
        held: frozenset[str] = frozenset()
        placed, full, tried = False, set(haul.pools), set[int]()
        while (job := self._next(now_ns, tried)) is not None:
            tried.add(job.seq)
            if job.pool.key in full:
                continue
            plan = self._plan_beside(job, now_ns)
            if plan is None:
                full.add(job.pool.key)
            elif traffic.quiet(self._seating.touches(job, plan)[0]):
                self._seating.begin(job, plan, now_ns)
                placed = True
            else:
                full.add(job.pool.key)
                held |= {job.pool.key}
        traffic.hold(held)
        return placed

    def _plan_beside(self, job: Job, now_ns: int) -> Plan | None:
        pool = job.pool
        if not pool.awake or not pool.weights.resident or not self._preparing.ask(job):
            return None
        # Who waits for bytes must not wait longer for it.
        short = any(item.reason == "bytes" for item in self.blocked.values())
        if short and pool.stage_ns is None:
            return None
        want = Want(pool.key, job.conversation.key, job.cells)
        plan = plan_seat(world(self._residency, self._jobs, now_ns, only=pool.key), want)
        light = isinstance(plan, Plan) and self._seating.is_light(job, plan)
        return plan if isinstance(plan, Plan) and light else None

    def _may_move(self, job: Job) -> bool:
        """Whether things may be moved for it: it is prepared, or cannot be before its model is
        loaded."""
        return job.pool.weights.handle is None or self._preparing.ask(job)

    def _joins(self, job: Job, plan: Plan) -> bool:
        """Whether it only joins what is on stage anyway."""
        on_stage = job.pool.stage_ns is not None
        return on_stage and all(isinstance(move, Park | Drop) for move in plan.moves)

    def _next(self, now_ns: int, tried: set[int]) -> Job | None:
        by_seq = {
            job.seq: job
            for job in self._jobs.waiting()
            if job.seq not in tried and job.verdict is None
        }
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
