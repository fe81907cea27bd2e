"""How jobs end: exactly once each, with a checkpoint or a rollback, and a receipt.

A job may be told to end while a batch or a haul is under way where its KV is. The verdict is noted
then and carried out as soon as that has come back; until then it counts as one that has ended: it
says nothing, it is in no batch, and nothing is moved for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

from vram_conductor.protocol.commands import Failed, RunDone
from vram_conductor.protocol.values import StopReason
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import Conversation, Residency
from vram_conductor.worker.store import Store
from vram_conductor.worker.streams import Streams
from vram_conductor.worker.traffic import Traffic

log = logging.getLogger(__name__)


class Ends:
    """Ends jobs."""

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        parking: Parking,
        store: Store,
        outbox: Outbox,
        streams: Streams,
        traffic: Traffic,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._parking = parking
        self._store = store
        self._outbox = outbox
        self._streams = streams
        self._traffic = traffic
        self._condemned: list[Job] = []

    def done(self, job: Job, stop_reason: StopReason, *, ids: tuple[int, ...] = ()) -> None:
        """The regular end. ``ids``: the last token, if it has not been sent yet."""
        if self._must_wait(job):
            self._condemn(job, partial(self.done, job, stop_reason))
            return
        self._flush(job, ids)
        # Its state is parked next, which takes as long as it is large.
        self._outbox.hurry()
        self._close(job)
        self._outbox.reply(
            RunDone,
            job.run,
            job=job.run.job,
            usage=job.usage(stop_reason),
            where=self.where(job.conversation),
            parked_bytes=self._store.bytes(job.conversation.key),
        )

    def failed(self, job: Job, error: Exception) -> None:
        """The job's own error; nobody else is affected."""
        if self._must_wait(job):
            self._condemn(job, partial(self.failed, job, error))
            return
        self._flush(job, ())
        # A broker that leaves, too, may not wait until the state is parked that has these tokens.
        self._outbox.hurry()
        self._close(job)
        info = info_of(error)
        if info.reason == "internal_error":
            log.error("a job of %s failed", job.conversation.key, exc_info=error)
        self._outbox.reply(
            Failed, job.run, error=info, job=job.run.job, usage=job.usage("cancelled")
        )

    def settle(self) -> None:
        """Carry out the verdicts that had to wait, as far as they need wait no more."""
        if not self._condemned:
            return
        waiting, self._condemned = self._condemned, []
        for job in waiting:
            verdict = job.verdict
            if verdict is None:
                continue  # it has ended by itself
            if self._must_wait(job):
                self._condemned.append(job)
            else:
                verdict()

    def where(self, conversation: Conversation) -> Literal["slot", "parked", "absent"]:
        """Where a conversation's KV is."""
        slot = conversation.slot
        if slot is not None and len(slot.tape):
            return "slot"
        return "parked" if self._store.meta(conversation.key) else "absent"

    def _must_wait(self, job: Job) -> bool:
        """Whether its end would touch a pool in which something is under way."""
        traffic = self._traffic
        if traffic.idle:
            return False
        if traffic.haul is not None and traffic.haul.job is job:
            return True
        # Read once: the haul may empty the slot at any moment, and then touches it no more.
        pool = job.conversation.pool
        if pool is not None and traffic.occupied(pool.key):
            return True
        return job.slot is not None and traffic.occupied(job.pool.key)

    def _condemn(self, job: Job, verdict: Callable[[], None]) -> None:
        """The first verdict counts."""
        if job.verdict is None:
            job.verdict = verdict
            self._condemned.append(job)
            pool = job.conversation.pool
            self._traffic.call_back([job.pool.key] if pool is None else [job.pool.key, pool.key])

    def _flush(self, job: Job, ids: tuple[int, ...]) -> None:
        self._streams.flush(job, job.text.finish() if job.committed else "", ids)

    def _close(self, job: Job) -> None:
        """Leave the slot: after the first token with a checkpoint, before it rolled back."""
        self._jobs.remove(job)
        self._residency.revision += 1
        job.verdict = None
        if job.task is not None:
            job.task.wanted = False
            job.task = None
        conversation, slot = job.conversation, job.slot
        if slot is not None:
            slot.job = job.slot = None
        if not job.committed:
            self._parking.roll_back(conversation)
        if conversation.pool is not None and conversation.slot is not None:
            self._parking.park(conversation.pool, conversation.slot)
        if job.sampler is not None:
            job.sampler.close()
            job.sampler = None
