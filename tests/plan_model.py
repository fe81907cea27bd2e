"""Replays a plan on a byte model, and checks at every move what must never happen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vram_conductor.worker.world import (
    BackUp,
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

GONE = SleepPool | SleepWeights | ClosePool | UnloadWeights
"""Moves that take something off the device."""


class Replay:
    """A world that moves change.

    Attributes:
        world: as it is now.
        peak_bytes: the most that was on the device.
    """

    def __init__(self, world: World) -> None:
        self.start = self.world = world
        self.peak_bytes = world.resident_bytes()
        self.reopened: set[str] = set()

    def follow(self, moves: Iterable[Move]) -> World:
        """Carry out ``moves``; returns the world after them."""
        moves = list(moves)
        self.reopened = {move.pool for move in moves if isinstance(move, OpenPool)}
        for move in moves:
            self._do(move)
            now_bytes = self.world.resident_bytes()
            self.peak_bytes = max(self.peak_bytes, now_bytes)
            if not isinstance(move, GONE | Park | Drop | BackUp):
                assert now_bytes <= self.world.budget_bytes, move
        self._check()
        return self.world

    def _do(self, move: Move) -> None:
        pools, weights = self.world.pools, self.world.weights
        match move:
            case Park(key, index) | Drop(key, index):
                view = pools[key].slots[index]
                assert view.conversation
                assert isinstance(move, Drop) == view.clean
                # A pool that is only reopened takes its jobs along.
                assert not view.frozen or key in self.reopened
                assert pools[key].awake
                slots = list(pools[key].slots)
                slots[index] = SlotView(index)
                busy = any(slot.busy for slot in slots)
                self._pool(pools[key], slots=tuple(slots), busy=busy)
            case SleepPool(key):
                assert pools[key].awake
                assert pools[key].sleepable
                assert not any(slot.conversation for slot in pools[key].slots)
                self._pool(pools[key], asleep=True)
            case WakePool(key):
                assert pools[key].asleep
                self._pool(pools[key], asleep=False)
            case ClosePool(key):
                assert pools[key].shape is not None
                assert not any(view.conversation for view in pools[key].slots)
                self._pool(pools[key], shape=None, open_bytes=0, slots=(), asleep=False)
            case OpenPool(key, shape):
                assert pools[key].shape is None
                assert weights[pools[key].model].resident
                slots = [SlotView(index) for index in range(shape.slots)]
                size = pools[key].want_bytes
                self._pool(pools[key], shape=shape, open_bytes=size, slots=tuple(slots))
            case SleepWeights(model):
                assert weights[model].resident
                assert weights[model].backed
                self._weights(weights[model], resident=False, asleep=True)
            case WakeWeights(model):
                assert weights[model].asleep
                self._weights(weights[model], resident=True, asleep=False)
            case UnloadWeights(model):
                assert weights[model].resident or weights[model].asleep
                assert not weights[model].pinned
                assert not any(item.shape for item in pools.values() if item.model == model)
                self._weights(weights[model], resident=False, asleep=False)
            case LoadWeights(model):
                assert not weights[model].resident
                assert not weights[model].asleep
                self._weights(weights[model], resident=True)
            case BackUp(model):
                assert weights[model].resident

    def _pool(self, view: PoolView, **fields: object) -> None:
        changed = replace(view, **fields)  # type: ignore[arg-type]
        self.world = replace(self.world, pools={**self.world.pools, view.key: changed})

    def _weights(self, view: WeightsView, **fields: object) -> None:
        changed = replace(view, **fields)  # type: ignore[arg-type]
        self.world = replace(self.world, weights={**self.world.weights, view.model: changed})

    def _check(self) -> None:
        """Nothing that computes was left without what it computes with."""
        for key, pool in self.world.pools.items():
            if any(slot.busy for slot in pool.slots):
                assert pool.awake
                assert self.world.weights[pool.model].resident, key
            if self.start.pools[key].frozen and self.start.pools[key].awake:
                assert self.world.weights[pool.model].resident


def follow(world: World, moves: Iterable[Move]) -> World:
    """The world after ``moves``."""
    return Replay(world).follow(moves)
