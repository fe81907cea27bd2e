"""What is promised before a load, beside what the device shows after it: a grid of both.

Every point asks the engine's own estimator, then loads the model, opens the pool, warms it up and
reads NVML. On a cpu device, where the worker's own count is what there is, the buffers that the
real load logged are taken instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.bench.grid_models import GRID_MODELS, GridModel, make_grid_model
from vram_conductor.worker.engine import Engine, Estimate, Model
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.vram import NvmlSampler

GRID = (
    PoolShape(2_048, 1, "f16"),
    PoolShape(8_192, 4, "q8_0"),
    PoolShape(32_768, 8, "f16"),
    PoolShape(131_072, 1, "q8_0"),
    PoolShape(131_072, 2, "f16"),
)
"""Every model at each of these."""

SMALL_GRID = (PoolShape(512, 1, "f16"), PoolShape(1_024, 2, "q8_0"))

LEFT_BYTES = 4 << 20
"""So much may still be in use after everything was closed."""


@dataclass
class Grid:
    """What was found.

    Attributes:
        rows: one per load: model, arch, n_ctx, kv_type, slots, promised_bytes and used_bytes, and
            of what they are made.
        failures: points that could not be loaded, and memory that did not come back.
    """

    device_name: str = ""
    base_bytes: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def measure_grid(device: str, folder: Path, seconds: float) -> Grid:
    """Measure as many points as fit into the time.

    Raises:
        ConductorError: ``no_driver``, ``no_device``, ``gguf_missing`` …
    """
    until = time.monotonic() + seconds
    grid = Grid()
    with_gpu = device.startswith("cuda")
    sampler = NvmlSampler(device) if with_gpu else None
    if sampler is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = sampler.uuid
    kind = "cuda" if with_gpu else "cpu"
    engine = open_engine(EngineOptions(device_kind=kind))  # type: ignore[arg-type]
    try:
        used: Callable[[], int] | None = None
        if sampler is not None:
            grid.device_name, grid.base_bytes = sampler.info().name, sampler.measure_base()
            used = lambda: sampler.sample(0).used_bytes  # noqa: E731
        before = used() if used else 0
        for model in GRID_MODELS:
            _measure_model(grid, engine, model if with_gpu else model.small(), folder, used, until)
        left = used() - before if used else 0
        grid.notes.append(f"in use after everything was closed: {left} bytes more than before")
        if left > LEFT_BYTES:
            grid.failures.append(f"{left} bytes are still in use after everything was closed")
    finally:
        engine.close()
        if sampler is not None:
            sampler.close()
    return grid


def _measure_model(
    grid: Grid,
    engine: Engine,
    model: GridModel,
    folder: Path,
    used: Callable[[], int] | None,
    until: float,
) -> None:
    path = str(make_grid_model(model, folder))
    shapes = list(_shapes(model, GRID if used else SMALL_GRID))
    estimates = {shape: _estimate(grid, engine, path, model.name, shape) for shape in shapes}
    before = used() if used else 0
    loaded = engine.load(path, model.name)
    weights = used() - before if used else loaded.measured_bytes
    try:
        for shape in shapes:
            estimate = estimates[shape]
            if estimate is None:
                continue
            if time.monotonic() > until:
                grid.notes.append(f"no time was left for {model.name} at {shape}")
                continue
            try:
                pool = _pool_bytes(loaded, shape, used)
            except ConductorError as error:
                grid.failures.append(f"{model.name} at {shape}: {error.info.message}")
                continue
            grid.rows.append(_row(model, estimate, weights, pool))
    finally:
        loaded.close()


def _estimate(
    grid: Grid, engine: Engine, path: str, name: str, shape: PoolShape
) -> Estimate | None:
    try:
        return engine.estimator.estimate(path, name, shape, shape.cells // shape.slots, None)
    except ConductorError as error:
        grid.failures.append(f"{name} at {shape}: {error.info.message}")
        return None


def _shapes(model: GridModel, shapes: tuple[PoolShape, ...]) -> Iterator[PoolShape]:
    """Without attention there is no cache to quantise, and no cells."""
    return (s for s in shapes if model.n_head or (s.kv_type == "f16" and s.cells < 16_384))


def _pool_bytes(model: Model, shape: PoolShape, used: Callable[[], int] | None) -> int:
    """What a warm pool takes."""
    before = used() if used else 0
    pool = model.open_pool(shape)
    try:
        if used is None:
            return pool.measured_bytes
        pool.warm_up()
        return used() - before
    finally:
        pool.close()


def _row(model: GridModel, estimate: Estimate, weights: int, pool: int) -> dict[str, Any]:
    shape = estimate.shape
    return {
        "model": model.name,
        "arch": model.arch,
        "n_ctx": shape.cells,
        "kv_type": shape.kv_type,
        "slots": shape.slots,
        "promised_bytes": estimate.weights_bytes + estimate.pool_bytes + estimate.scratch_bytes,
        "used_bytes": weights + pool,
        "weights": [estimate.weights_bytes, weights],
        "pool": [estimate.pool_bytes + estimate.scratch_bytes, pool],
        "scratch_bytes": estimate.scratch_bytes,
    }
