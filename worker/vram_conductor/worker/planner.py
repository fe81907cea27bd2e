"""What has to move so that a job can run, a model can load, a smaller budget is kept. *Pure.*

The planner never plans beyond the budget: it frees first and loads afterwards. It takes away
nothing that is frozen (see ``schedule``), and nothing at all while there is room. Weights of
admitted agents are left alone as long as all of them fit beside the one pool in question
("reserve"); only where they do not, weights go too ("timeshare").
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.eviction import (
    Rank,
    Victims,
    choose,
    rank_all,
    rank_idle,
    rank_pools,
    rank_unowned,
)
from vram_conductor.worker.world import (
    ClosePool,
    Drop,
    LoadWeights,
    Move,
    OpenPool,
    Park,
    PoolView,
    SlotView,
    UnloadWeights,
    WeightsView,
    World,
)


@dataclass(frozen=True)
class Want:
    """A job that needs a slot for its conversation and so many cells in it."""

    pool: str
    conversation: ConversationKey
    cells: int


@dataclass(frozen=True)
class Plan:
    """Moves in order. After them ``slot`` is the job's: empty, or its own conversation's."""

    moves: tuple[Move, ...] = ()
    slot: int = 0


@dataclass(frozen=True)
class Blocked:
    """It cannot be done now.

    Attributes:
        reason: ``slots`` or ``cells``: jobs that run in the same pool hold them; ``bytes``:
            other pools hold them; ``budget``: it would not fit even alone.
        need_bytes: what it would take alone, the process's own share included.
    """

    reason: str
    need_bytes: int = 0
    budget_bytes: int = 0


def plan_seat(world: World, want: Want) -> Plan | Blocked:
    """A slot for a job, opening or reopening its pool if it must be."""
    pool = world.pools[want.pool]
    if pool.shape is None:
        return plan_open(world, want.pool)
    seat = _seat(pool, want)
    if isinstance(seat, Plan) or not pool.grows:
        return seat
    held = [slot for slot in pool.slots if slot.frozen]
    if len(held) >= pool.want.slots or (
        sum(slot.cells for slot in held) + want.cells > pool.want.cells
    ):
        return seat
    return plan_open(world, want.pool)


def plan_open(world: World, key: str, *, gentle: bool = False) -> Plan | Blocked:
    """Open a pool in its wanted shape, weights included; close it first where it is open.

    ``gentle``: take away only what no admitted agent has a use for.
    """
    pool = world.pools[key]
    weights = world.weights[pool.model]
    alone = world.base_bytes + weights.bytes + weights.scratch_bytes + pool.want_bytes
    if alone > world.budget_bytes:
        return Blocked("budget", alone, world.budget_bytes)
    victims = _make_room(world, pool, weights, gentle=gentle)
    if victims is None:
        return Blocked("bytes", alone, world.budget_bytes)
    moves = _evict(victims)
    if pool.shape is not None:
        moves += _close(pool)
    if not weights.resident:
        moves.append(LoadWeights(pool.model))
    moves.append(OpenPool(key, pool.want))
    return Plan(tuple(moves))


def plan_weights(world: World, model: str) -> Plan | Blocked:
    """Load weights at registration: idle pools make room, nothing else does."""
    weights = world.weights[model]
    if weights.resident:
        return Plan()
    need = world.base_bytes + weights.bytes
    if need > world.budget_bytes:
        return Blocked("budget", need, world.budget_bytes)
    deficit = world.resident_bytes() + weights.bytes - world.budget_bytes
    victims = choose(world, deficit, rank_idle, keep_model=model)
    if victims is None:
        return Blocked("bytes", need, world.budget_bytes)
    return Plan((*_evict(victims), LoadWeights(model)))


def plan_shrink(world: World) -> Plan:
    """Get down to the budget, or as near to it as can be. What runs goes last."""
    deficit = world.resident_bytes() - world.budget_bytes
    resident = sum(item.bytes for item in world.weights.values() if item.resident)
    stay = world.base_bytes + resident <= world.budget_bytes
    victims = choose(world, deficit, rank_pools if stay else rank_all)
    if victims is None:
        victims = Victims(
            [pool for pool in world.pools.values() if pool.shape],
            [item for item in world.weights.values() if item.resident and not item.pinned],
        )
    return Plan(tuple(_evict(victims)))


def _make_room(
    world: World, pool: PoolView, weights: WeightsView, *, gentle: bool
) -> Victims | None:
    live = any(item.shape and item.model == pool.model for item in world.pools.values())
    more = 0 if weights.resident else weights.bytes
    more += pool.want_bytes - (pool.open_bytes if pool.shape else 0)
    more += 0 if live else weights.scratch_bytes
    deficit = world.resident_bytes() + more - world.budget_bytes
    kept = sum(item.bytes for item in world.weights.values() if item.resident and item.owned)
    kept += 0 if weights.resident and weights.owned else weights.bytes
    alone = world.base_bytes + kept + weights.scratch_bytes + pool.want_bytes
    rank: Rank = rank_pools if alone <= world.budget_bytes else rank_all
    if gentle:
        rank = rank_unowned
    return choose(world, deficit, rank, keep_pool=pool.key, keep_model=pool.model)


def _seat(pool: PoolView, want: Want) -> Plan | Blocked:
    """A slot in the pool as it is open: the conversation's own, a free one, or the one of the
    longest idle conversation. Slots of others are emptied until the cells suffice."""
    assert pool.shape is not None
    others = [slot for slot in pool.slots if slot.conversation != want.conversation]
    own = [slot.index for slot in pool.slots if slot.conversation == want.conversation]
    free = [slot.index for slot in others if slot.conversation is None]
    seat = (own + free + [None])[0]
    idle = [slot for slot in others if slot.conversation and not slot.busy]
    running = [slot for slot in others if slot.busy and not slot.frozen]
    idle.sort(key=lambda slot: slot.used_ns)
    running.sort(key=lambda slot: slot.order)
    order = [*idle, *running]
    cells = want.cells + sum(slot.cells for slot in others)
    moves: list[Move] = []
    while seat is None or cells > pool.shape.cells:
        if not order:
            return Blocked("slots" if seat is None else "cells")
        slot = order.pop(0)
        moves.append(_empty(pool, slot))
        cells -= slot.cells
        seat = slot.index if seat is None else seat
    return Plan(tuple(moves), seat)


def _evict(victims: Victims) -> list[Move]:
    moves: list[Move] = []
    for pool in victims.pools:
        moves += _close(pool)
    moves += [UnloadWeights(item.model) for item in victims.weights]
    return moves


def _close(pool: PoolView) -> list[Move]:
    occupied = [slot for slot in pool.slots if slot.conversation]
    return [*(_empty(pool, slot) for slot in occupied), ClosePool(pool.key)]


def _empty(pool: PoolView, slot: SlotView) -> Move:
    if slot.clean:
        return Drop(pool.key, slot.index)
    return Park(pool.key, slot.index)
