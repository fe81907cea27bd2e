"""Brings a job and its conversation's KV into a slot: the moves first, then the KV, then STARTED.

The moves and the copies are a haul; what they mean for the job is decided on the engine thread,
before and after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vram_conductor.protocol.commands import Started
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.job import Job
from vram_conductor.worker.loader import given_up, waits
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.planner import Plan
from vram_conductor.worker.preparing import Preparing
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.reuse import Reuse
from vram_conductor.worker.traffic import Haul, Touches, Traffic, touches
from vram_conductor.worker.world import ClosePool

log = logging.getLogger(__name__)

MOST_REFUSALS = 2
"""So often a job is planned anew after the device has refused to wake or to put to sleep; what it
was is loaded or opened again then."""


@dataclass
class _Transfer:
    """One job on its way into a slot.

    Attributes:
        stage_ns: since when its pool had been on stage before the moves.
        took_ms: what the haul took.
        reuse: what the slot holds after it; None: the job was not prepared yet.
    """

    job: Job
    plan: Plan
    now_ns: int
    stage_ns: int | None
    took_ms: float = 0.0
    reuse: Reuse | None = None


class Seating:
    """Seats jobs.

    Attributes:
        refused: the last haul failed, and the same would fail now: its job waits on. Others have
            taken the memory, or what cannot be woken is still being read.
    """

    def __init__(
        self,
        residency: Residency,
        mover: Mover,
        parking: Parking,
        ends: Ends,
        outbox: Outbox,
        clock: Callable[[], int],
        preparing: Preparing,
        traffic: Traffic,
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._parking = parking
        self._ends = ends
        self._outbox = outbox
        self._clock = clock
        self._preparing = preparing
        self._traffic = traffic
        self.refused = False

    def touches(self, job: Job, plan: Plan) -> Touches:
        """What has to be quiet for it."""
        pools, there = [job.pool.key], job.conversation.pool
        if there is not None:
            pools.append(there.key)
        return touches(self._residency, plan.moves, *pools)

    def is_light(self, job: Job, plan: Plan) -> bool:
        """Whether nothing moves for it: its KV is in its slot, or there is none."""
        conversation = job.conversation
        if plan.moves or job.prompt is None:
            return False
        if conversation.slot is None:
            return self._ends.where(conversation) == "absent"
        return conversation.pool is job.pool

    def begin(self, job: Job, plan: Plan, now_ns: int) -> None:
        """Do what a plan says. What it touches is quiet."""
        transfer = _Transfer(job, plan, now_ns, job.pool.stage_ns)
        haul = Haul(
            self.touches(job, plan),
            partial(self._carry, transfer),
            partial(self._finish, transfer),
            job,
        )
        if self.is_light(job, plan):
            self._traffic.run(haul)
        else:
            self._traffic.begin(haul)

    def _carry(self, transfer: _Transfer) -> None:
        """On the hauler."""
        job, plan = transfer.job, transfer.plan
        reopen = job.pool.key if ClosePool(job.pool.key) in plan.moves else ""
        bring = partial(self._bring, transfer) if job.prompt is not None else None
        begin = self._clock()
        try:
            if plan.moves:
                self._mover.carry_out(plan.moves, job.receipt, reopen=reopen, meanwhile=bring)
            elif bring is not None:
                # The mover may be in use: this may be beside a haul.
                bring()
        finally:
            transfer.took_ms = (self._clock() - begin) / 1e6

    def _bring(self, transfer: _Transfer) -> None:
        """Put the conversation's KV into the slot, as far as there is any. On the hauler."""
        job = transfer.job
        pool, conversation, paper = job.pool, job.conversation, job.receipt
        if conversation.pool is not None and conversation.slot and conversation.pool is not pool:
            self._parking.release(conversation.pool, conversation.slot)
        slot = pool.slots[transfer.plan.slot]
        begin = self._clock()
        transfer.reuse = reuse = self._parking.resume(conversation, pool, slot, job.work.view())
        if reuse.bytes:
            paper.moved_ms += (self._clock() - begin) / 1e6
            paper.moved_bytes += reuse.bytes
            self._mover.swaps += 1

    def _finish(self, transfer: _Transfer, error: Exception | None) -> None:
        job, pool = transfer.job, transfer.job.pool
        self._residency.revision += 1
        self.refused = False
        if self._traffic.parallel:
            transfer.now_ns = self._clock()
        if error is not None:
            if not self._waits_on(job, error) and job.verdict is None:
                self._ends.failed(job, error)
            return
        # A pool that was only reopened keeps its time slice.
        pool.stage_ns = transfer.now_ns if transfer.stage_ns is None else transfer.stage_ns
        if job.verdict is not None:
            return
        if transfer.reuse is None:
            job.bringing_ms += transfer.took_ms
            # Where that takes a while, the pool waits for it on its stage.
            if self._preparing.ask(job):
                self.begin(job, Plan((), transfer.plan.slot), transfer.now_ns)
            return
        self._seat(job, transfer.plan.slot, transfer.reuse, transfer.now_ns)
        if transfer.plan.moves or transfer.reuse.restored or job.bringing_ms:
            pool.note_swap(job.bringing_ms + transfer.took_ms)
            job.bringing_ms = 0.0

    def _waits_on(self, job: Job, error: Exception) -> bool:
        """Whether a job whose moves have failed is planned anew."""
        self.refused = waits(error)
        if self.refused:
            return True
        if not given_up(error) or job.refusals == MOST_REFUSALS:
            return False
        job.refusals += 1
        log.error("%s is planned anew: %s", job.conversation.key, info_of(error).message)
        # What somebody reads cannot be unloaded before that is over.
        self.refused = any(weights.readers for weights in self._residency.weights.values())
        return True

    def _seat(self, job: Job, index: int, reuse: Reuse, now_ns: int) -> None:
        """The slot is the job's; say STARTED."""
        pool, conversation, paper = job.pool, job.conversation, job.receipt
        assert job.prompt is not None
        slot = pool.slots[index]
        had = job.held if job.seated_once else job.expected()
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
