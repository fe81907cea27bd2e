"""Products of real sizes, to see how long they take."""

from __future__ import annotations

import numpy as np
from kernel_scenes import SEED
from kernel_timing import KernelTimer
from quantised_models import random_rows

from vram_conductor.worker.pipeline.gpu import Launch
from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.matmul_geometry import Matmul, matmul, to_half
from vram_conductor.worker.pipeline.tensor_types import TensorType

CACHES_BYTES = 256 << 20
LARGEST_TOKENS = 512


class MatmulRig:
    """A matrix, as often as no cache holds it, and activations for it."""

    def __init__(self, timer: KernelTimer, kind: TensorType, rows: int, columns: int) -> None:
        self.timer, self.kind, self.rows, self.columns = timer, kind, rows, columns
        self.n_bytes = rows * kind.row_bytes(columns)
        self.cores = timer.gpu.capability >= (8, 0)
        self._module = timer.gpu.module(kernel_source("matmul.cu"))
        # Random, not zeros: the device is slower where more of its bits change.
        rng = np.random.default_rng(SEED)
        data = np.ascontiguousarray(random_rows(rng, kind, columns, np.ones(rows)))
        x = rng.normal(size=(LARGEST_TOKENS, columns)).astype(np.float32)
        self._weights = [timer.upload(data) for _ in range(-(-CACHES_BYTES // self.n_bytes))]
        self._x = timer.upload(x)
        self._half = timer.memory(2 * x.size)
        self._scale = timer.memory(4 * LARGEST_TOKENS)
        self._y = timer.memory(4 * LARGEST_TOKENS * rows)
        self.to_half_ms(LARGEST_TOKENS)

    def ms(self, tokens: int, chosen: Matmul | None = None) -> float:
        """Of one product."""
        chosen = chosen or matmul(
            self.kind,
            self.rows,
            tokens,
            multiprocessors=self.timer.gpu.multiprocessors,
            tensor_cores=self.cores,
        )
        sizes = np.int32(self.rows), np.int32(self.columns), np.int32(tokens)
        launches = [
            self._prepare(chosen, w, self._half, self._scale, self._y, 0, 0, *sizes)
            for w in self._weights
        ]
        return self.timer.ms(launches)

    def to_half_ms(self, tokens: int) -> float:
        sizes = np.int32(tokens), np.int32(self.columns)
        launch = Matmul("to_half", to_half(tokens))
        return self.timer.ms([self._prepare(launch, self._x, self._half, self._scale, *sizes)] * 20)

    def tflops(self, tokens: int, ms: float) -> float:
        return 2e-9 * self.rows * self.columns * tokens / ms

    def _prepare(self, launch: Matmul, *arguments: int | np.generic) -> Launch:
        it = launch.geometry
        return self._module.prepare(launch.kernel, it.grid, it.block, arguments, it.shared_bytes)
