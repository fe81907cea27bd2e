"""In what order victims go and what is wanted comes, within the budget all the time. *Pure.*

What frees memory without copying goes first; then comes whatever fits, as soon as it fits; what
has to be copied out goes last. So weights wake while the KV of others is still on its way out, and
both directions of the bus are in use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vram_conductor.worker.eviction import Victims
from vram_conductor.worker.world import (
    ClosePool,
    Drop,
    LoadWeights,
    Move,
    OpenPool,
    Park,
    PoolView,
    SleepPool,
    SleepWeights,
    SlotView,
    UnloadWeights,
    WakePool,
    WakeWeights,
    WeightsView,
    World,
)


@dataclass(frozen=True)
class Bring:
    """What comes: weights and a pool, each only if it is not there.

    Attributes:
        weights: the model whose weights come. ``pool``: the pool that comes.
        reopen: it is open in another shape and is closed first.
    """

    weights: WeightsView | None = None
    pool: PoolView | None = None
    reopen: bool = False

    @property
    def wakes_pool(self) -> bool:
        """Whether the pool only wakes."""
        return self.pool is not None and self.pool.asleep and not self.reopen


@dataclass(frozen=True)
class _Group:
    """Moves that free memory, and how much."""

    moves: tuple[Move, ...]
    frees_bytes: int


@dataclass
class _Writer:
    """The list of moves, and what is free after them."""

    world: World
    bring: Bring
    free_bytes: int
    moves: list[Move] = field(default_factory=list)
    has_weights: bool = False
    has_pool: bool = False

    def free(self, groups: list[_Group]) -> None:
        """Add groups; after each, what fits by then comes."""
        self.come()
        for group in groups:
            self.moves += group.moves
            self.free_bytes += group.frees_bytes
            self.come()

    def come(self) -> None:
        """Add what fits by now."""
        bring = self.bring
        if bring.weights and not self.has_weights:
            model = bring.weights.model
            comes = WakeWeights(model) if bring.weights.asleep else LoadWeights(model)
            self.has_weights = self._take(bring.weights.bytes, comes)
        if bring.wakes_pool and bring.pool and not self.has_pool:
            # After the weights: it moves no contents, and mapping it costs nothing beside a copy.
            self.has_pool = self._take(bring.pool.open_bytes, WakePool(bring.pool.key))
        if bring.pool and not bring.wakes_pool and not self.has_pool:
            scratch = self.world.weights[bring.pool.model].scratch_bytes
            ready = self.has_weights or bring.weights is None
            closed = not bring.reopen or ClosePool(bring.pool.key) in self.moves
            if ready and closed:
                opens = OpenPool(bring.pool.key, bring.pool.want)
                self.has_pool = self._take(bring.pool.want_bytes + scratch, opens)

    def _take(self, size_bytes: int, move: Move) -> bool:
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        self.moves.append(move)
        return True


def sequence(world: World, victims: Victims, bring: Bring | None = None) -> tuple[Move, ...]:
    """The moves. After all victims have gone there is room for what comes."""
    bring = bring or Bring()
    writer = _Writer(world, bring, world.budget_bytes - world.resident_bytes())
    quick, slow = _groups(world, victims, bring)
    writer.free(quick)
    writer.free(slow)
    assert writer.has_pool or bring.pool is None
    assert writer.has_weights or bring.weights is None
    return tuple(writer.moves)


def _groups(world: World, victims: Victims, bring: Bring) -> tuple[list[_Group], list[_Group]]:
    """What frees memory at once, and what has to be copied or closed first."""
    quick = [
        _Group((SleepWeights(model),), world.weights[model].bytes)
        for model in sorted(victims.weights_sleeping)
    ]
    slow: list[_Group] = []
    for key in sorted(victims.pools):
        pool = world.pools[key]
        closes = key in victims.closed
        group = _leave(world, pool, closes=closes)
        (slow if closes or not pool.clean else quick).append(group)
    for model in sorted(victims.unloaded):
        item = world.weights[model]
        slow.append(_Group((UnloadWeights(model),), item.bytes if item.resident else 0))
    if bring.reopen and bring.pool:
        slow.append(_leave(world, bring.pool, closes=True))
    return quick, slow


def _leave(world: World, pool: PoolView, *, closes: bool) -> _Group:
    occupied = [slot for slot in pool.slots if slot.conversation]
    last: Move = ClosePool(pool.key) if closes else SleepPool(pool.key)
    frees = pool.open_bytes if pool.awake else 0
    frees += world.weights[pool.model].scratch_bytes if closes else 0
    return _Group((*(empty(pool, slot) for slot in occupied), last), frees)


def empty(pool: PoolView, slot: SlotView) -> Move:
    """How a slot is emptied."""
    if slot.clean:
        return Drop(pool.key, slot.index)
    return Park(pool.key, slot.index)
