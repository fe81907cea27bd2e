"""Who goes when room is needed, and how: the cheapest set of idle things first. *Pure.*

Whatever can sleep goes to sleep, because that is cheap to undo. A pool that sleeps may be closed
yet, where its scratch is what is missing. Weights sleep beside their open pools; they are unloaded
only together with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.worker.world import PoolView, WeightsView, World

Item = PoolView | WeightsView
Rank = Callable[[Item], int | None]
"""Tier of a thing (a lower tier goes first), None if it must stay."""


@dataclass(frozen=True)
class Victims:
    """What goes. ``closed`` pools may be awake or asleep now."""

    sleeping: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    weights_sleeping: frozenset[str] = frozenset()
    unloaded: frozenset[str] = frozenset()

    @property
    def pools(self) -> frozenset[str]:
        """Pools that do not stay as they are."""
        return self.sleeping | self.closed

    @property
    def weights(self) -> frozenset[str]:
        """Models whose weights do not stay."""
        return self.weights_sleeping | self.unloaded

    def bytes(self, world: World) -> int:
        """What their going frees."""
        closed = [world.pools[key] for key in self.closed]
        return (
            sum(world.pools[key].open_bytes for key in self.pools if world.pools[key].awake)
            + sum(world.weights[pool.model].scratch_bytes for pool in closed)
            + sum(world.weights[key].bytes for key in self.weights if world.weights[key].resident)
        )


@dataclass(frozen=True)
class _Step:
    """One more thing that may go, how it would leave the victims, and what that costs."""

    tier: int
    after: Victims
    cost_ms: float
    idle_ms: float
    name: str


@dataclass
class _Choice:
    """A search for victims. ``keep_pool`` and the weights ``keep_model`` are not among them."""

    world: World
    rank: Rank
    keep_pool: str
    keep_model: str
    chosen: Victims = field(default_factory=Victims)

    def steps(self) -> list[_Step]:
        """What may go next."""
        found = [self._pool(pool) for pool in self.world.pools.values()]
        found += [self._weights(item) for item in self.world.weights.values()]
        return [step for step in found if step is not None]

    def _pool(self, pool: PoolView) -> _Step | None:
        chosen, tier = self.chosen, self.rank(pool)
        if tier is None or pool.shape is None or pool.frozen or pool.key == self.keep_pool:
            return None
        if pool.key in chosen.closed:
            return None
        one = frozenset((pool.key,))
        if pool.awake and pool.key not in chosen.sleeping:
            if pool.sleepable:
                after = _with(chosen, sleeping=chosen.sleeping | one)
                return self._step(tier, after, pool, pool.wake_ms + pool.kv_ms)
            after = _with(chosen, closed=chosen.closed | one)
            return self._step(tier, after, pool, pool.cost_ms + pool.kv_ms)
        if not self.world.weights[pool.model].scratch_bytes:
            return None
        if pool.owned and self.rank is rank_gentle:
            return None
        after = _with(chosen, sleeping=chosen.sleeping - one, closed=chosen.closed | one)
        return self._step(tier, after, pool, pool.cost_ms)

    def _weights(self, item: WeightsView) -> _Step | None:
        chosen, tier = self.chosen, self.rank(item)
        if tier is None or not item.resident or item.model in chosen.weights:
            return None
        mine = [pool for pool in self.world.pools.values() if pool.model == item.model]
        if item.model == self.keep_model or any(pool.frozen for pool in mine if pool.awake):
            return None
        staying = [pool for pool in mine if pool.awake and pool.key not in chosen.pools]
        one = frozenset((item.model,))
        if item.backed:
            # What runs is moved before what it runs on.
            if any(pool.busy for pool in staying):
                return None
            after = _with(chosen, weights_sleeping=chosen.weights_sleeping | one)
            return self._step(tier, after, item, item.wake_ms)
        open_keys = frozenset(pool.key for pool in mine if pool.shape)
        if item.pinned or staying or self.keep_pool in open_keys:
            return None
        after = _with(
            chosen,
            sleeping=chosen.sleeping - open_keys,
            closed=chosen.closed | open_keys,
            unloaded=chosen.unloaded | one,
        )
        more = sum(pool.cost_ms for pool in mine if pool.key in open_keys - chosen.closed)
        return self._step(tier, after, item, item.cost_ms + more)

    def _step(self, tier: int, after: Victims, item: Item, cost_ms: float) -> _Step:
        idle_ms = max(0, self.world.now_ns - item.used_ns) / 1e6
        name = item.key if isinstance(item, PoolView) else item.model
        return _Step(tier, after, cost_ms, idle_ms, name)

    def take(self, deficit_bytes: int) -> bool:
        """Choose one more; False if there is nothing left."""
        steps = self.steps()
        if not steps:
            return False
        had = self.chosen.bytes(self.world)
        left = deficit_bytes - had

        def order(step: _Step) -> tuple[int, float, float, str]:
            # What bringing it back costs, per time that it was not used and per byte that helps:
            # a cheap one goes before a dear one, an old one before a recent one.
            regret = (step.cost_ms + 1.0) / (step.idle_ms + 1.0)
            useful = min(left, step.after.bytes(self.world) - had)
            return step.tier, regret / useful if useful > 0 else float("inf"), regret, step.name

        self.chosen = min(steps, key=order).after
        return True


def rank_gentle(item: Item) -> int | None:
    """What no admitted agent has a use for, and what nobody uses now and only has to be woken."""
    if not item.owned:
        return 0
    wakes = item.sleepable and item.awake if isinstance(item, PoolView) else item.backed
    return 1 if wakes and not item.jobs else None


def rank_idle(item: Item) -> int | None:
    """What is unowned, pools without jobs, and such weights as need not be loaded again."""
    if not item.owned:
        return 0
    if item.jobs or (isinstance(item, WeightsView) and not item.backed):
        return None
    return 1 if isinstance(item, PoolView) else 2


def rank_pools(item: Item) -> int | None:
    """Pools, those that run last; of the weights those that are unowned, or idle and soon back."""
    if not item.owned:
        return 0
    if isinstance(item, WeightsView):
        return 1 if item.backed and not item.jobs else None
    return 3 if item.busy else 2 if item.jobs else 1


def rank_all(item: Item) -> int | None:
    """Pools and weights: what is idle, by cost; then pools with jobs, then their weights."""
    if not item.owned:
        return 0
    if isinstance(item, WeightsView):
        return 4 if item.jobs else 1
    return 3 if item.busy else 2 if item.jobs else 1


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
    choice = _Choice(world, rank, keep_pool, keep_model)
    while choice.chosen.bytes(world) < deficit_bytes:
        if not choice.take(deficit_bytes):
            return None
    return _spare(world, choice.chosen, deficit_bytes)


def everything(world: World) -> Victims:
    """All that can go, as far as it takes memory of the device."""
    choice = _Choice(world, lambda item: 0, "", "")
    while choice.take(1 << 62):
        pass
    return choice.chosen


def _with(
    victims: Victims,
    *,
    sleeping: frozenset[str] | None = None,
    closed: frozenset[str] | None = None,
    weights_sleeping: frozenset[str] | None = None,
    unloaded: frozenset[str] | None = None,
) -> Victims:
    return Victims(
        victims.sleeping if sleeping is None else sleeping,
        victims.closed if closed is None else closed,
        victims.weights_sleeping if weights_sleeping is None else weights_sleeping,
        victims.unloaded if unloaded is None else unloaded,
    )


def _spare(world: World, chosen: Victims, deficit_bytes: int) -> Victims:
    """Take back what turned out not to be needed, the dearest first."""
    for fewer in _milder(world, chosen):
        after = fewer(chosen)
        if after is not None and after.bytes(world) >= deficit_bytes:
            chosen = after
    return chosen


Milder = Callable[[Victims], Victims | None]


def _milder(world: World, chosen: Victims) -> list[Milder]:
    """Ways to take something back, in the order in which they are tried: weights with jobs and
    dear ones first, then pools; a pool that is closed may sleep instead."""

    def keep_weights(model: str) -> Milder:
        one = frozenset((model,))
        return lambda victims: _with(
            victims,
            weights_sleeping=victims.weights_sleeping - one,
            unloaded=victims.unloaded - one,
        )

    def keep_pool(key: str) -> Milder:
        one, pool = frozenset((key,)), world.pools[key]

        def milder(victims: Victims) -> Victims | None:
            # Weights do not go without it.
            if pool.model in victims.unloaded:
                return None
            if pool.busy and pool.model in victims.weights_sleeping:
                return None
            return _with(victims, sleeping=victims.sleeping - one, closed=victims.closed - one)

        return milder

    def only_sleep(key: str) -> Milder:
        one, pool = frozenset((key,)), world.pools[key]

        def milder(victims: Victims) -> Victims | None:
            if pool.model in victims.unloaded or key not in victims.closed:
                return None
            return _with(victims, sleeping=victims.sleeping | one, closed=victims.closed - one)

        return milder

    def weight(item: Item) -> tuple[bool, float]:
        if isinstance(item, WeightsView):
            cost_ms = item.wake_ms if item.model in chosen.weights_sleeping else item.cost_ms
        else:
            cost_ms = item.wake_ms if item.key in chosen.sleeping else item.cost_ms
            cost_ms += item.kv_ms
        return not item.jobs, -cost_ms

    weights = sorted((world.weights[key] for key in chosen.weights), key=weight)
    pools = sorted((world.pools[key] for key in chosen.pools), key=weight)
    ways = [keep_weights(item.model) for item in weights]
    ways += [keep_pool(item.key) for item in pools]
    ways += [only_sleep(item.key) for item in pools if item.awake and item.sleepable]
    return ways
