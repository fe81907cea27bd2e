"""How jobs end: exactly once each, with a checkpoint or a rollback, and a receipt."""

from __future__ import annotations

import logging
from typing import Literal

from vram_conductor.protocol.commands import Failed, RunDone, RunTokens
from vram_conductor.protocol.values import StopReason
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import Conversation, Residency
from vram_conductor.worker.store import Store

log = logging.getLogger(__name__)


class Ends:
    """Ends jobs."""

    def __init__(
        self, residency: Residency, jobs: Jobs, parking: Parking, store: Store, outbox: Outbox
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._parking = parking
        self._store = store
        self._outbox = outbox

    def done(self, job: Job, stop_reason: StopReason, *, ids: list[int] | None = None) -> None:
        """The regular end. ``ids``: the last token, if it has not been sent yet."""
        self._flush(job, ids or [])
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
        self._flush(job, [])
        self._close(job)
        info = info_of(error)
        if info.reason == "internal_error":
            log.error("a job of %s failed", job.conversation.key, exc_info=error)
        self._outbox.reply(
            Failed, job.run, error=info, job=job.run.job, usage=job.usage("cancelled")
        )

    def where(self, conversation: Conversation) -> Literal["slot", "parked", "absent"]:
        """Where a conversation's KV is."""
        if conversation.slot is not None and len(conversation.slot.tape):
            return "slot"
        return "parked" if self._store.meta(conversation.key) else "absent"

    def _flush(self, job: Job, ids: list[int]) -> None:
        text = job.text.finish() if job.committed else ""
        if text or ids:
            self._outbox.reply(RunTokens, job.run, job=job.run.job, text=text, ids=ids)

    def _close(self, job: Job) -> None:
        """Leave the slot: after the first token with a checkpoint, before it rolled back."""
        self._jobs.remove(job)
        self._residency.revision += 1
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
