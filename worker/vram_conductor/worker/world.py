"""Frozen views of what is where, and the moves that change it. *Pure.*"""

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
        jobs: how many jobs it has, running or waiting.
        busy: a job runs in it.
        frozen: it must not be closed.
        owned: an agent is admitted for it.
        cost_ms: what reopening it costs.
    """

    key: str
    model: str
    want: PoolShape
    want_bytes: int
    shape: PoolShape | None = None
    open_bytes: int = 0
    jobs: int = 0
    busy: bool = False
    frozen: bool = False
    owned: bool = True
    used_ns: int = 0
    cost_ms: float = 0.0
    slots: tuple[SlotView, ...] = ()

    @property
    def grows(self) -> bool:
        """Whether reopening would give more slots or more cells."""
        return self.shape is not None and (
            self.want.slots > self.shape.slots or self.want.cells > self.shape.cells
        )


@dataclass(frozen=True)
class WeightsView:
    """One model's weights. ``jobs``: jobs that need them; ``pinned``: they cannot go now."""

    model: str
    bytes: int
    scratch_bytes: int = 0
    resident: bool = False
    jobs: int = 0
    owned: bool = True
    pinned: bool = False
    used_ns: int = 0
    cost_ms: float = 0.0


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
        live = {pool.model for pool in self.pools.values() if pool.shape}
        return (
            self.base_bytes
            + sum(item.bytes for item in self.weights.values() if item.resident)
            + sum(self.weights[model].scratch_bytes for model in live)
            + sum(pool.open_bytes for pool in self.pools.values() if pool.shape)
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
class ClosePool:
    pool: str


@dataclass(frozen=True)
class OpenPool:
    """Create the pool in this shape. Its weights are resident."""

    pool: str
    shape: PoolShape


@dataclass(frozen=True)
class UnloadWeights:
    model: str


@dataclass(frozen=True)
class LoadWeights:
    model: str


Move = Park | Drop | ClosePool | OpenPool | UnloadWeights | LoadWeights
