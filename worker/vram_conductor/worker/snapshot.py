"""Frozen views of the residency for the planner. *Pure.*"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.residency import PoolState, Residency, Slot, Weights
from vram_conductor.worker.world import PoolView, SlotView, WeightsView, World


def world(
    residency: Residency,
    jobs: Jobs,
    now_ns: int,
    *,
    frozen_pools: Collection[str] = (),
    frozen_jobs: Collection[int] = (),
    only: str | None = None,
) -> World:
    """Everything as it is now. ``frozen_jobs`` by ``seq``; ``only``: just this pool and its
    weights, for whoever looks while others are moved."""
    owned = residency.owned_models() | residency.owned_pools()
    needed: dict[str, int] = {}
    pools: dict[str, PoolView] = {}
    shown = residency.pools if only is None else {only: residency.pools[only]}
    for key, pool in shown.items():
        count = len(jobs.in_pool(key))
        model = pool.weights.model
        needed[model] = needed.get(model, 0) + count
        pools[key] = replace(
            _pool(residency, pool),
            jobs=count,
            frozen=key in frozen_pools,
            owned=key in owned,
            slots=tuple(_slot(pool, slot, frozen_jobs) for slot in pool.slots),
        )
    weights = {
        model: replace(_weights(residency, item, needed.get(model, 0)), owned=model in owned)
        for model, item in residency.weights.items()
        if only is None or model in needed
    }
    budget_bytes = residency.budget_bytes
    if residency.shortage is not None:
        budget_bytes = residency.shortage.limit(budget_bytes, now_ns)
    return World(now_ns, budget_bytes, residency.base_bytes, weights, pools)


def _pool(residency: Residency, pool: PoolState) -> PoolView:
    rates = residency.rates
    return PoolView(
        pool.key,
        pool.weights.model,
        want=pool.want,
        want_bytes=pool.want_bytes,
        shape=pool.shape,
        open_bytes=pool.open_bytes,
        asleep=pool.asleep,
        sleepable=pool.handle is not None and pool.handle.sleepable,
        busy=any(slot.job for slot in pool.slots),
        used_ns=pool.used_ns,
        cost_ms=pool.open_ms or rates.expect_ms("open_pool", pool.want_bytes),
        wake_ms=rates.expect_ms("wake_pool", pool.open_bytes),
        kv_ms=_kv_ms(residency, pool),
    )


def _weights(residency: Residency, item: Weights, jobs: int) -> WeightsView:
    rates = residency.rates
    return WeightsView(
        item.model,
        item.bytes,
        scratch_bytes=item.scratch_bytes,
        resident=item.resident,
        asleep=item.asleep,
        backed=item.backed,
        jobs=jobs,
        pinned=item.readers > 0,
        used_ns=item.used_ns,
        cost_ms=item.load_ms or rates.expect_ms("load", item.bytes),
        wake_ms=rates.expect_ms("wake_weights", item.bytes),
    )


def _kv_ms(residency: Residency, pool: PoolState) -> float:
    """What it costs to empty a pool's slots, and to fill them again."""
    total_ms = 0.0
    for slot in pool.slots:
        agent = residency.agents.get(slot.conversation.key.agent_key) if slot.conversation else None
        if agent is None or not agent.n_ctx:
            continue
        size = len(slot.tape) * agent.state_bytes // agent.n_ctx
        total_ms += residency.rates.expect_ms("state_in", size)
        total_ms += 0.0 if slot.clean else residency.rates.expect_ms("state_out", size)
    return total_ms


def _slot(pool: PoolState, slot: Slot, frozen_jobs: Collection[int]) -> SlotView:
    job = slot.job
    return SlotView(
        slot.index,
        conversation=slot.conversation.key if slot.conversation else None,
        cells=job.cells if job else len(slot.tape),
        clean=slot.clean,
        busy=job is not None,
        frozen=job is not None and job.seq in frozen_jobs,
        used_ns=slot.used_ns,
        order=(job.run.priority, -job.seq) if job else (0, 0),
    )
