"""What has to move so that a job can run, a model can load, a smaller budget is kept. *Pure.*

The planner never plans beyond the budget, at no moment between two moves. It takes away nothing
that is frozen (see ``schedule``), and nothing at all while there is room. Weights of admitted
agents are not unloaded as long as all of them fit beside the one pool in question ("reserve"); only
where they do not, they go too ("timeshare"). Idle ones that have a backup sleep wherever that is
cheaper than what a pool's going costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.eviction import (
    Rank,
    Victims,
    choose,
    everything,
    rank_all,
    rank_gentle,
    rank_idle,
    rank_pools,
)
from vram_conductor.worker.sequence import Bring, empty, sequence
from vram_conductor.worker.world import Move, PoolView, World


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
    """A slot for a job, opening, reopening or waking what it needs if it must be."""
    pool = world.pools[want.pool]
    if not pool.awake:
        return plan_open(world, want.pool)
    seat = _seat(pool, want)
    if isinstance(seat, Plan):
        return _with_weights(world, pool, seat)
    if not pool.grows:
        return seat
    held = [slot for slot in pool.slots if slot.frozen]
    if len(held) >= pool.want.slots or (
        sum(slot.cells for slot in held) + want.cells > pool.want.cells
    ):
        return seat
    return plan_open(world, want.pool)


def plan_open(world: World, key: str, *, gentle: bool = False) -> Plan | Blocked:
    """Have a pool awake that covers the wanted shape, weights included: wake it where it sleeps
    in such a shape; else open it, and close it first where it is open.

    ``gentle``: take away only what no admitted agent has a use for, and put to sleep only what
    nobody uses now.
    """
    pool = world.pools[key]
    weights = world.weights[pool.model]
    wakes = pool.asleep and not pool.grows
    bring = Bring(
        None if weights.resident else weights, pool, reopen=pool.shape is not None and not wakes
    )
    size = pool.open_bytes if wakes else pool.want_bytes
    alone = world.base_bytes + weights.bytes + weights.scratch_bytes + size
    if alone > world.budget_bytes:
        return Blocked("budget", alone, world.budget_bytes)
    victims = _make_room(world, bring, pool, gentle=gentle)
    if victims is None:
        return Blocked("bytes", alone, world.budget_bytes)
    return Plan(sequence(world, victims, bring))


def plan_weights(world: World, model: str) -> Plan | Blocked:
    """Load weights at registration: idle pools make room, and idle weights that only have to be
    woken again; nothing else does. Weights that sleep are loaded."""
    weights = world.weights[model]
    if weights.resident or weights.asleep:
        return Plan()
    need = world.base_bytes + weights.bytes
    if need > world.budget_bytes:
        return Blocked("budget", need, world.budget_bytes)
    deficit = world.resident_bytes() + weights.bytes - world.budget_bytes
    victims = choose(world, deficit, rank_idle, keep_model=model)
    if victims is None:
        return Blocked("bytes", need, world.budget_bytes)
    return Plan(sequence(world, victims, Bring(weights)))


def plan_shrink(world: World) -> Plan:
    """Get down to the budget, or as near to it as can be. What runs goes last."""
    deficit = world.resident_bytes() - world.budget_bytes
    resident = sum(item.bytes for item in world.weights.values() if item.resident)
    stay = world.base_bytes + resident <= world.budget_bytes
    victims = choose(world, deficit, rank_pools if stay else rank_all)
    return Plan(sequence(world, everything(world) if victims is None else victims))


def _with_weights(world: World, pool: PoolView, seat: Plan) -> Plan | Blocked:
    """The seat, and the pool's weights where they sleep."""
    weights = world.weights[pool.model]
    if weights.resident:
        return seat
    alone = world.base_bytes + weights.bytes + weights.scratch_bytes + pool.open_bytes
    if alone > world.budget_bytes:
        return Blocked("budget", alone, world.budget_bytes)
    bring = Bring(weights)
    victims = _make_room(world, bring, pool, gentle=False)
    if victims is None:
        return Blocked("bytes", alone, world.budget_bytes)
    return Plan((*sequence(world, victims, bring), *seat.moves), seat.slot)


def _make_room(world: World, bring: Bring, pool: PoolView, *, gentle: bool) -> Victims | None:
    weights = world.weights[pool.model]
    more = bring.weights.bytes if bring.weights else 0
    size, scratch = pool.open_bytes, 0
    if bring.pool and not bring.wakes_pool:
        more += pool.want_bytes - (pool.open_bytes if pool.awake else 0)
        size, scratch = pool.want_bytes, 0 if pool.shape else weights.scratch_bytes
    elif bring.pool:
        more += pool.open_bytes
    deficit = world.resident_bytes() + more + scratch - world.budget_bytes
    kept = sum(item.bytes for item in world.weights.values() if item.resident and item.owned)
    kept += 0 if weights.resident and weights.owned else weights.bytes
    alone = world.base_bytes + kept + weights.scratch_bytes + size
    rank: Rank = rank_pools if alone <= world.budget_bytes else rank_all
    if gentle:
        rank = rank_gentle
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
        moves.append(empty(pool, slot))
        cells -= slot.cells
        seat = slot.index if seat is None else seat
    return Plan(tuple(moves), seat)
