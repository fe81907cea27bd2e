"""Plays the broker towards a core over llama.cpp."""

from __future__ import annotations

import time
from pathlib import Path

from core_driver import Driver, LanesKind
from fake_engine import FakeDevice

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.engine import Engine, Estimate
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.preparing import Preparer

BUDGET = 4 << 30


class RealTime(FakeDevice):
    """The clock of this machine; it counts no bytes."""

    def clock(self) -> int:
        return time.monotonic_ns()

    def __getattribute__(self, name: str) -> object:
        return time.monotonic_ns() if name == "now_ns" else super().__getattribute__(name)

    def spend(self, ms: float) -> None:
        pass


class RealDriver(Driver):
    """The driver over llama.cpp. ``files``: path by name."""

    def __init__(
        self,
        engine: Engine,
        files: dict[str, Path],
        *,
        store: KVStore,
        budget_bytes: int = BUDGET,
        base_bytes: int = 0,
        batch_tokens: int = 64,
        slice_ms: int = 2000,
        preparer: Preparer | None = None,
        lanes: LanesKind | None = None,
    ) -> None:
        self.files = files
        self._estimates: dict[tuple[str, PoolShape], Estimate] = {}
        super().__init__(
            [],
            budget_bytes=budget_bytes,
            base_bytes=base_bytes,
            batch_tokens=batch_tokens,
            slice_ms=slice_ms,
            lanes=lanes,
            real_engine=engine,
            real_store=store,
            preparer=preparer,
        )
        self.device = RealTime()
        self.core = self._new_core()
        self.welcome()

    def estimate(self, name: str, shape: PoolShape) -> Estimate:
        assert self.real_engine is not None
        if (name, shape) not in self._estimates:
            self._estimates[name, shape] = self.real_engine.estimator.estimate(
                str(self.files[name]), name, shape, shape.cells, None
            )
        return self._estimates[name, shape]

    def sizes(self, model: str, shape: PoolShape) -> tuple[str, int, int]:
        found = self.estimate(model, shape)
        return str(self.files[model]), found.weights_bytes, found.pool_bytes

    def scratch(self, model: str, shape: PoolShape) -> int:
        return self.estimate(model, shape).scratch_bytes

    def identity(self, model: str) -> str:
        return self.estimate(model, PoolShape(256, 1)).info.model

    def leave(self) -> None:
        """Unload everything: the engine outlives this driver."""
        for agent in list(self.agents):
            self.unload(agent.agent)
        assert self.core.residency.resident_bytes() == self.base_bytes
