"""Who may want what next: the prefetch planner's view of jobs and parked states. *Pure.*"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.planner import Blocked
from vram_conductor.worker.prefetch import ParkedView, Waiter
from vram_conductor.worker.residency import Conversation, Residency
from vram_conductor.worker.schedule import ranked
from vram_conductor.worker.store import Store

LOOKED_AT = 16
"""Conversations without a job that are looked at, the most recently used ones."""


def waiters(jobs: Jobs, blocked: Mapping[int, Blocked], store: Store, now_ns: int) -> list[Waiter]:
    """The waiting jobs, the first one first. ``blocked``: why they wait, by ``Job.seq``."""
    waiting = {job.seq: job for job in jobs.waiting()}
    order = ranked([job.view() for job in waiting.values()], now_ns)
    return [_waiter(waiting[view.seq], blocked, store) for view in order]


def _waiter(job: Job, blocked: Mapping[int, Blocked], store: Store) -> Waiter:
    why, talk = blocked.get(job.seq), job.conversation
    # A state can be judged only against what the job will compute.
    known = job.prompt is not None
    return Waiter(
        job.pool.key,
        talk.key,
        job.cells,
        why.reason if why else "",
        parked=known and talk.slot is None and store.meta(talk.key) is not None,
    )


def parked(residency: Residency, jobs: Jobs, store: Store) -> list[ParkedView]:
    """Conversations without a job whose KV could go back into a slot: of those whose pool has a
    free one the most recently used."""
    free = {
        key
        for key, pool in residency.pools.items()
        if pool.awake and any(slot.conversation is None for slot in pool.slots)
    }
    if not free:
        return []
    busy = {job.conversation.key for job in jobs}
    recent = heapq.nlargest(
        LOOKED_AT, residency.conversations.values(), key=lambda talk: talk.used_ns
    )
    views = [_parked(residency, talk, store) for talk in recent if talk.key not in busy]
    return [view for view in views if view is not None and view.pool in free]


def _parked(residency: Residency, talk: Conversation, store: Store) -> ParkedView | None:
    """None: it is in a slot, has no state, or one that this process has not written: that is
    judged only when its tokens are known."""
    agent, meta = residency.agents.get(talk.key.agent_key), store.meta(talk.key)
    if agent is None or meta is None or talk.slot is not None or talk.parked_ids is None:
        return None
    return ParkedView(agent.pool, talk.key, meta.n_tokens, talk.used_ns)
