"""Who goes when room is needed: nothing, or the cheapest set of idle things first. *Pure.*"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.worker.world import PoolView, WeightsView, World

Item = PoolView | WeightsView
Rank = Callable[[Item], int | None]
"""Tier of a thing (a lower tier goes first), None if it must stay."""


@dataclass
class Victims:
    """What goes. Weights go only together with every open pool of their model."""

    pools: list[PoolView] = field(default_factory=list)
    weights: list[WeightsView] = field(default_factory=list)

    def bytes(self, world: World) -> int:
        """What their going frees."""
        gone = {pool.key for pool in self.pools}
        live = {pool.model for pool in world.pools.values() if pool.shape}
        left = {pool.model for pool in world.pools.values() if pool.shape and pool.key not in gone}
        return (
            sum(pool.open_bytes for pool in self.pools)
            + sum(item.bytes for item in self.weights)
            + sum(world.weights[model].scratch_bytes for model in live - left)
        )


def rank_unowned(item: Item) -> int | None:
    """Only what no admitted agent has a use for."""
    return None if item.owned else 0


def rank_idle(item: Item) -> int | None:
    """What is unowned, and pools without jobs."""
    if not item.owned:
        return 0
    return 1 if isinstance(item, PoolView) and not item.jobs else None


def rank_pools(item: Item) -> int | None:
    """Pools, those that run last; of the weights only unowned ones."""
    if not item.owned:
        return 0
    if isinstance(item, WeightsView):
        return None
    return 3 if item.busy else 2 if item.jobs else 1


def rank_all(item: Item) -> int | None:
    """Pools and weights: idle pools, idle weights, pools with jobs, then their weights."""
    if not item.owned:
        return 0
    if isinstance(item, WeightsView):
        return 5 if item.jobs else 2
    return 4 if item.busy else 3 if item.jobs else 1


def choose(
    world: World,
    deficit_bytes: int,
    rank: Rank,
    *,
    keep_pool: str = "",
    keep_model: str = "",
) -> Victims | None:
    """Victims that free at least ``deficit_bytes``: none where it is <= 0, None where it cannot
    be done. ``keep_pool`` and the weights ``keep_model`` are not among them."""
    chosen = Victims()
    while chosen.bytes(world) < deficit_bytes:
        options = _options(world, chosen, rank, keep_pool, keep_model)
        if not options:
            return None
        _, _, item = min(options, key=lambda option: option[:2])
        if isinstance(item, PoolView):
            chosen.pools.append(item)
        else:
            chosen.weights.append(item)
    return _spare(world, chosen, deficit_bytes)


def _options(
    world: World, chosen: Victims, rank: Rank, keep_pool: str, keep_model: str
) -> list[tuple[int, float, Item]]:
    gone = {pool.key for pool in chosen.pools}
    items: list[Item] = [
        pool
        for pool in world.pools.values()
        if pool.shape and pool.key not in gone and pool.key != keep_pool and not pool.frozen
    ]
    pinned = {
        pool.model for pool in world.pools.values() if pool.shape and pool.key not in gone
    } | {keep_model}
    taken = {item.model for item in chosen.weights}
    items += [
        item
        for item in world.weights.values()
        if item.resident and not item.pinned and item.model not in pinned | taken
    ]
    options = []
    for item in items:
        tier = rank(item)
        if tier is not None:
            options.append((tier, _regret(item, world.now_ns), item))
    return options


def _regret(item: Item, now_ns: int) -> float:
    """Cost of bringing it back per time that it was not used: a cheap one goes before a dear
    one, an old one before a recent one."""
    idle_ms = max(0, now_ns - item.used_ns) / 1e6
    return (item.cost_ms + 1.0) / (idle_ms + 1.0)


def _spare(world: World, chosen: Victims, deficit_bytes: int) -> Victims:
    """Take back what turned out not to be needed, the dearest first."""
    for item in sorted(chosen.weights, key=lambda item: -item.cost_ms):
        fewer = Victims(chosen.pools, [other for other in chosen.weights if other is not item])
        if fewer.bytes(world) >= deficit_bytes:
            chosen = fewer
    unloaded = {item.model for item in chosen.weights}
    for pool in sorted(chosen.pools, key=lambda item: (-(item.jobs > 0), -item.cost_ms)):
        fewer = Victims([other for other in chosen.pools if other is not pool], chosen.weights)
        if pool.model not in unloaded and fewer.bytes(world) >= deficit_bytes:
            chosen = fewer
    return chosen
