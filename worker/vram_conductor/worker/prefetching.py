"""Brings early what may be wanted next, one thing at a time, while nothing else is moved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.job import Job, Receipt
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.outbox import info_of
from vram_conductor.worker.prefetch import BringKV, ParkedView, Prefetch, Waiter, plan_prefetch
from vram_conductor.worker.prospects import parked, waiters
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.snapshot import world
from vram_conductor.worker.store import Store
from vram_conductor.worker.traffic import Haul, Touches, Traffic, touches
from vram_conductor.worker.turns import Turns
from vram_conductor.worker.world import BackUp

log = logging.getLogger(__name__)

CALM_NS = 1_000_000_000
"""Backups are made when no job has come or gone for so long: pinning memory takes its time, and
whoever needs something moved would have to wait for it."""

AGAIN_NS = 1_000_000_000
"""After a refusal (others have taken the memory) nothing is brought early for so long."""


class Prefetching:
    """Has done what ``prefetch`` proposes."""

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        mover: Mover,
        store: Store,
        turns: Turns,
        traffic: Traffic,
        clock: Callable[[], int],
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._mover = mover
        self._store = store
        self._turns = turns
        self._traffic = traffic
        self._clock = clock
        self._fruitless: tuple[int, int, bool] | None = None
        self._jobs_seen = -1
        self._changed_ns = 0
        self._not_before_ns = 0
        self._vain: dict[ConversationKey, int] = {}

    def go_on(self, now_ns: int) -> bool:
        """Begin to bring the next thing; False if there is none, or no time for it."""
        traffic = self._traffic
        if traffic.haul is not None or traffic.held or traffic.rests:
            return False
        if now_ns < self._not_before_ns:
            return False
        if self._jobs.revision != self._jobs_seen:
            self._jobs_seen, self._changed_ns = self._jobs.revision, now_ns
        calm = now_ns - self._changed_ns >= CALM_NS
        picture = self._jobs.revision, self._residency.revision, calm
        if picture == self._fruitless:
            return False
        found = self._plan(now_ns, calm=calm)
        if found is None or not traffic.quiet(self._touches(found)[0]):
            self._fruitless = picture
            return False
        self._begin(found)
        return True

    def _plan(self, now_ns: int, *, calm: bool) -> Prefetch | None:
        return plan_prefetch(
            world(self._residency, self._jobs, now_ns),
            [
                view if self._may_bring(view) else replace(view, parked=False)
                for view in waiters(self._jobs, self._turns.blocked, self._store, now_ns)
            ],
            [
                view
                for view in parked(self._residency, self._jobs, self._store)
                if self._may_bring(view)
            ],
            running_lanes=len({job.pool.key for job in self._jobs.running()}),
            backups=self._mover.backups() if calm else (),
        )

    def _may_bring(self, view: Waiter | ParkedView) -> bool:
        """Not into a pool that computes, and not what could not be brought the last time."""
        talk = self._residency.conversation(view.conversation)
        return self._traffic.free(view.pool) and self._vain.get(talk.key) != talk.used_ns

    def _touches(self, move: Prefetch) -> Touches:
        match move:
            case BringKV(key):
                return frozenset([key]), frozenset()
            case BackUp():
                # It only reads: others may compute with these weights meanwhile.
                return frozenset(), frozenset()
            case _:
                return touches(self._residency, [move])

    def _begin(self, move: Prefetch) -> None:
        job: Job | None = None
        if isinstance(move, BringKV):
            job = self._jobs.of_conversation(move.conversation)
            talk = self._residency.conversation(move.conversation)
            ids = job.work if job is not None and job.prompt is not None else talk.transcript.ids
            work = partial(self._bring, move, ids.view(), talk.used_ns)
        else:
            work = partial(self._mover.carry_out, [move], Receipt())
        self._traffic.begin(Haul(self._touches(move), work, self._finish, job))

    def _bring(self, move: BringKV, ids: Tokens, used_ns: int) -> None:
        """On the hauler."""
        if self._mover.bring_kv(move, ids):
            self._vain.pop(move.conversation, None)
        else:
            self._vain[move.conversation] = used_ns

    def _finish(self, error: Exception | None) -> None:
        self._residency.revision += 1
        if error is not None:
            log.warning("nothing is brought early for a while: %s", info_of(error).message)
            self._not_before_ns = self._clock() + AGAIN_NS
