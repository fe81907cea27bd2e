"""One model in the ledger, and how to undo a measurement of it. Pure."""

from __future__ import annotations

from vram_conductor.broker.ledger.figure import Figure, Mark
from vram_conductor.broker.ledger.pools import Pool
from vram_conductor.protocol.values import PoolShape


class ModelEntry:
    """One model: its users, weights, scratch, and the keys of its pools."""

    __slots__ = (
        "agents",
        "label",
        "model",
        "pools",
        "scratch",
        "scratch_bytes",
        "weights",
        "weights_bytes",
    )

    def __init__(self, model: str, label: str) -> None:
        self.model = model
        self.label = label
        self.agents = 0
        self.weights = Figure()
        self.scratch = Figure()
        self.pools: set[str] = set()
        # What the book's sums contain for this model.
        self.weights_bytes = 0
        self.scratch_bytes = 0


class Undo:
    """What ``Book.measure`` changed, so that it can be taken back."""

    __slots__ = ("figures", "forget", "model", "pool")

    def __init__(self, model: ModelEntry, pool: Pool | None) -> None:
        self.model = model
        self.pool = pool
        self.figures: list[tuple[Figure, Mark]] = []
        self.forget: PoolShape | None = None
