"""What to bring onto the device before it is anybody's turn. *Pure.*

Nothing goes for the sake of it: what is brought has to fit beside everything that is there. One
proposal at a time; the caller asks again when it has been carried out.

A wake beside running decodes slows them down for as long as it lasts (driver locks while memory is
mapped, and bandwidth). It saves the waiting job the whole wake. So it is worth it as long as what
all lanes lose together is less than what one job gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.world import BackUp, PoolView, WakePool, WakeWeights, World

SLOWDOWN = 0.28
"""Share of its rate that a decode loses while another model wakes, measured on an H200."""

FRESH_NS = 60_000_000_000
"""Parked KV that nobody has used for longer is not brought back on suspicion."""


@dataclass(frozen=True)
class Waiter:
    """A waiting job, in the order in which they will be served.

    Attributes:
        cells: what it will reserve.
        blocked: why it waits, as in ``planner.Blocked``; empty if it was not asked yet.
        parked: its KV is in the store and in no slot.
    """

    pool: str
    conversation: ConversationKey
    cells: int
    blocked: str = ""
    parked: bool = False


@dataclass(frozen=True)
class ParkedView:
    """A conversation without a job whose KV is in the store and in no slot; ``cells`` it takes."""

    pool: str
    conversation: ConversationKey
    cells: int
    used_ns: int = 0


@dataclass(frozen=True)
class BringKV:
    """Copy a parked state into an empty slot of a pool that is awake."""

    pool: str
    slot: int
    conversation: ConversationKey


Prefetch = WakeWeights | WakePool | BringKV | BackUp


def plan_prefetch(
    world: World,
    waiters: Sequence[Waiter],
    parked: Sequence[ParkedView] = (),
    *,
    running_lanes: int = 0,
    backups: Sequence[str] = (),
) -> Prefetch | None:
    """The next thing to bring, None if there is none.

    Args:
        waiters: the first one first.
        parked: in any order.
        running_lanes: pools that compute now.
        backups: models that could be backed up, see ``backup.plan_backups``.
    """
    found = (
        _wake(world, waiters, running_lanes)
        or _kv_of_waiters(world, waiters)
        or _kv_of_others(world, waiters, parked)
    )
    if found is not None or waiters or running_lanes:
        return found
    return _wake_idle(world) or (BackUp(backups[0]) if backups else None)


def worth(wake_ms: float, running_lanes: int, slowdown: float = SLOWDOWN) -> bool:
    """Whether a wake of ``wake_ms`` beside so many lanes saves more than it costs them."""
    return wake_ms > slowdown * wake_ms * running_lanes


def _wake(world: World, waiters: Sequence[Waiter], running_lanes: int) -> Prefetch | None:
    """Weights, or the pool, of the first job that waits for bytes: what of it fits alone."""
    first = next((item for item in waiters if item.blocked == "bytes"), None)
    if first is None:
        return None
    pool = world.pools[first.pool]
    weights = world.weights[pool.model]
    free = world.budget_bytes - world.resident_bytes()
    if weights.asleep and weights.bytes <= free and worth(weights.wake_ms, running_lanes):
        return WakeWeights(pool.model)
    # A pool only beside weights that are there, or it takes the room that these will need.
    fits = pool.asleep and not pool.grows and pool.open_bytes <= free and weights.resident
    return WakePool(pool.key) if fits and worth(pool.wake_ms, running_lanes) else None


def _wake_idle(world: World) -> Prefetch | None:
    """Nobody works: whatever fits is awake, the most recently used first (a hog has left)."""
    free = world.budget_bytes - world.resident_bytes()
    for item in sorted(world.weights.values(), key=lambda item: -item.used_ns):
        if item.owned and item.asleep and item.bytes <= free:
            return WakeWeights(item.model)
    for pool in sorted(world.pools.values(), key=lambda pool: -pool.used_ns):
        ready = pool.owned and pool.asleep and not pool.grows
        if ready and world.weights[pool.model].resident and pool.open_bytes <= free:
            return WakePool(pool.key)
    return None


def _kv_of_waiters(world: World, waiters: Sequence[Waiter]) -> BringKV | None:
    for waiter in waiters:
        if waiter.parked:
            found = _bring(world.pools[waiter.pool], waiter.conversation, waiter.cells)
            if found is not None:
                return found
    return None


def _kv_of_others(
    world: World, waiters: Sequence[Waiter], parked: Sequence[ParkedView]
) -> BringKV | None:
    """The most recently used first; not into pools that somebody waits for."""
    wanted = {waiter.pool for waiter in waiters}
    for view in sorted(parked, key=lambda item: -item.used_ns):
        if world.now_ns - view.used_ns > FRESH_NS:
            return None
        if view.pool not in wanted:
            found = _bring(world.pools[view.pool], view.conversation, view.cells)
            if found is not None:
                return found
    return None


def _bring(pool: PoolView, conversation: ConversationKey, cells: int) -> BringKV | None:
    """A free slot with enough free cells, if there is one."""
    if not pool.awake or pool.shape is None:
        return None
    if any(slot.conversation == conversation for slot in pool.slots):
        return None
    free = next((slot for slot in pool.slots if slot.conversation is None), None)
    taken = sum(slot.cells for slot in pool.slots)
    if free is None or taken + cells > pool.shape.cells:
        return None
    return BringKV(pool.key, free.index, conversation)
