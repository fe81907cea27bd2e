"""Whose turn it is: ranks waiting jobs and says what may not be taken away for them. *Pure.*

Jobs of one pool run together (continuous batching). Where pools, or conversations within a pool,
compete for room, they take turns at token boundaries:

- a waiting job's *rank* is its priority plus one level per :data:`AGING_NS` of waiting;
- what is on the device stays there for at least a *time slice*: the floor, or so long that the
  swaps take at most a tenth of the time, whichever is longer. Towards a job of higher priority
  only the second holds;
- it stays until it has got somewhere, in any case;
- after its slice it still stays while its priority is above the waiting job's rank.

A slice belongs to a pool, not to a job: jobs that join a pool within its slice cause no swap, and
jobs that join it after its slice do not prolong it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

AGING_NS = 5_000_000_000
"""Waiting for this long weighs as much as one level of priority."""

SLICE_NS = 2_000_000_000
"""Floor of a time slice."""

SWAP_SHARE_PERCENT = 10
"""Largest share of the time that swapping may take while pools compete."""


@dataclass(frozen=True)
class JobView:
    """A job as the scheduler sees it.

    Attributes:
        seq: counts jobs in order of arrival.
        pool: key of its pool.
        priority: higher runs first.
        waiting_ns: since when it waits (arrival, or its last preemption).
        placed_ns: since when it is in a slot, None while it waits.
        settling: it has got nowhere yet since it was placed, so that taking its slot now would
            have been a swap for nothing.
        front: it lost its slot only because its pool is being reopened: it comes back first.
    """

    seq: int
    pool: str
    priority: int
    waiting_ns: int
    placed_ns: int | None = None
    settling: bool = False
    front: bool = False


@dataclass(frozen=True)
class StageView:
    """An open pool that has jobs: since when, and what a swap costs."""

    pool: str
    since_ns: int
    swap_ms: float


def stay_ns(swap_ms: float, *, floor_ns: int, urgent: bool) -> int:
    """How long what was swapped in stays at least. ``urgent``: for a job of higher priority."""
    share_ns = int(swap_ms * 1e6) * (100 - SWAP_SHARE_PERCENT) // SWAP_SHARE_PERCENT
    return share_ns if urgent else max(floor_ns, share_ns)


def rank(job: JobView, now_ns: int) -> float:
    """Priority plus aging."""
    return job.priority + max(0, now_ns - job.waiting_ns) / AGING_NS


def ranked(jobs: Iterable[JobView], now_ns: int) -> list[JobView]:
    """The waiting jobs, best first. Among equals the longest wait, then the earliest arrival."""
    waiting = [job for job in jobs if job.placed_ns is None]
    return sorted(waiting, key=lambda job: (not job.front, -rank(job, now_ns), job.seq))


def frozen_pools(
    waiter: JobView,
    jobs: Iterable[JobView],
    stages: Mapping[str, StageView],
    now_ns: int,
    floor_ns: int = SLICE_NS,
) -> frozenset[str]:
    """Pools that may not be closed for ``waiter``'s sake. A pool without jobs never is one."""
    top: dict[str, int] = {}
    frozen: set[str] = set()
    for job in jobs:
        top[job.pool] = max(job.priority, top.get(job.pool, job.priority))
        if job.settling and job.pool != waiter.pool:
            frozen.add(job.pool)
    own = stages.get(waiter.pool)
    own_ms = own.swap_ms if own else 0.0
    for pool, priority in top.items():
        stage = stages.get(pool)
        if stage is None or pool == waiter.pool:
            continue
        swap_ms = max(stage.swap_ms, own_ms)
        if _holds(waiter, priority, stage.since_ns, swap_ms, now_ns, floor_ns):
            frozen.add(pool)
    return frozenset(frozen)


def frozen_jobs(
    waiter: JobView,
    jobs: Iterable[JobView],
    swap_ms: float,
    now_ns: int,
    floor_ns: int = SLICE_NS,
) -> frozenset[int]:
    """Running jobs of ``waiter``'s own pool (by ``seq``) that may not lose their slot to it."""
    return frozenset(
        job.seq
        for job in jobs
        if job.pool == waiter.pool
        and job.placed_ns is not None
        and (job.settling or _holds(waiter, job.priority, job.placed_ns, swap_ms, now_ns, floor_ns))
    )


def _holds(
    waiter: JobView, priority: int, since_ns: int, swap_ms: float, now_ns: int, floor_ns: int
) -> bool:
    urgent = waiter.priority > priority
    if now_ns - since_ns < stay_ns(swap_ms, floor_ns=floor_ns, urgent=urgent):
        return True
    return rank(waiter, now_ns) < priority
