"""Frozen views of what is where, and the moves that change it. *Pure.*

Memory of a model comes in three parts: its weights; the buffers of each of its pools; and scratch,
which every live context takes beyond its buffers and keeps until it is closed, asleep or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vram_conductor.protocol.values import ConversationKey, PoolShape


@dataclass(frozen=True)
class SlotView:
    """One sequence of an open pool.

    Attributes:
        cells: used, or reserved by the job that runs there.
        clean: emptying it loses nothing.
        busy: a job runs there. ``frozen``: and must not be preempted.
        order: among busy slots the smallest is preempted first.
    """

    index: int
    conversation: ConversationKey | None = None
    cells: int = 0
    clean: bool = True
    busy: bool = False
    frozen: bool = False
    used_ns: int = 0
    order: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PoolView:
    """A pool; ``shape`` is None while it is closed.

    Attributes:
        open_bytes: its buffers when awake; 0 while it is closed.
        asleep: its context lives, its buffers do not. ``sleepable``: they can be given back so.
        jobs: how many jobs it has, running or waiting.
        busy: a job runs in it.
        frozen: it must not be closed, nor sleep.
        owned: an agent is admitted for it.
        cost_ms: what reopening it costs. ``wake_ms``: what waking it does.
        kv_ms: what it costs to empty its slots and to bring their contents back.
    """

    key: str
    model: str
    want: PoolShape
    want_bytes: int
    shape: PoolShape | None = None
    open_bytes: int = 0
    asleep: bool = False
    sleepable: bool = False
    jobs: int = 0
    busy: bool = False
    frozen: bool = False
    owned: bool = True
    used_ns: int = 0
    cost_ms: float = 0.0
    wake_ms: float = 0.0
    kv_ms: float = 0.0
    slots: tuple[SlotView, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether reopening would give more slots or more cells."""
        return self.shape is not None and (
            self.want.slots > self.shape.slots or self.want.cells > self.shape.cells
        )

    @property
    def awake(self) -> bool:
        """Whether its buffers are on the device."""
        return self.shape is not None and not self.asleep

    @property
    def clean(self) -> bool:
        """Whether all of it can be emptied without copying anything."""
        return all(slot.clean for slot in self.slots if slot.conversation)


@dataclass(frozen=True)
class WeightsView:
    """One model's weights: on the device (``resident``), ``asleep``, or not loaded.

    Attributes:
        backed: they can sleep: a backup is there.
        jobs: jobs that need them.
        pinned: they cannot be unloaded now (they may sleep).
        cost_ms: what loading them costs. ``wake_ms``: what waking them does.
    """

    model: str
    bytes: int
    scratch_bytes: int = 0
    resident: bool = False
    asleep: bool = False
    backed: bool = False
    jobs: int = 0
    owned: bool = True
    pinned: bool = False
    used_ns: int = 0
    cost_ms: float = 0.0
    wake_ms: float = 0.0


@dataclass(frozen=True)
class World:
    """All that the planner needs to know."""

    now_ns: int
    budget_bytes: int
    base_bytes: int
    weights: Mapping[str, WeightsView]
    pools: Mapping[str, PoolView]

    def resident_bytes(self) -> int:
        """Bytes on the device now."""
        return (
            self.base_bytes
            + sum(item.bytes for item in self.weights.values() if item.resident)
            + sum(
                self.weights[pool.model].scratch_bytes for pool in self.pools.values() if pool.shape
            )
            + sum(pool.open_bytes for pool in self.pools.values() if pool.awake)
        )


@dataclass(frozen=True)
class Park:
    """Copy a slot's state to the store, then empty it."""

    pool: str
    slot: int


@dataclass(frozen=True)
class Drop:
    """Empty a slot; the store has its state already."""

    pool: str
    slot: int


@dataclass(frozen=True)
class SleepPool:
    """Give an empty pool's buffers back; its context and scratch stay."""

    pool: str


@dataclass(frozen=True)
class WakePool:
    """Take its buffers again, empty. Its weights may be asleep, or on their way."""

    pool: str


@dataclass(frozen=True)
class ClosePool:
    """Free an empty pool, awake or asleep, with its scratch."""

    pool: str


@dataclass(frozen=True)
class OpenPool:
    """Create the pool in this shape. Its weights are resident."""

    pool: str
    shape: PoolShape


@dataclass(frozen=True)
class SleepWeights:
    """Give their memory back; nothing is copied. Pools stay as they are, and none of them computes
    until the weights are awake again; their states can be read and written."""

    model: str


@dataclass(frozen=True)
class WakeWeights:
    """Take the memory again and copy them in. Where the moves that follow do not need them, this
    may run beside those."""

    model: str


@dataclass(frozen=True)
class UnloadWeights:
    """Free them, awake or asleep; no pool of theirs is open."""

    model: str


@dataclass(frozen=True)
class LoadWeights:
    model: str


@dataclass(frozen=True)
class BackUp:
    """Copy them to pinned host memory, so that they can sleep."""

    model: str


PoolMove = Park | Drop | SleepPool | WakePool | ClosePool | OpenPool
WeightsMove = SleepWeights | WakeWeights | UnloadWeights | LoadWeights | BackUp
Move = PoolMove | WeightsMove
