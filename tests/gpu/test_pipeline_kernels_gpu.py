"""The kernels' scenes of tests/worker on a real GPU, and how fast they are there."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from argmax_scenes import ArgmaxScenes
from kernel_scenes import KernelBench
from kernel_timing import KernelTimer
from matvec_scenes import FormatScenes, MatvecScenes, every_type

from vram_conductor.worker.pipeline.kernel_source import kernel_source, matvec_name
from vram_conductor.worker.pipeline.launch_geometry import matvec
from vram_conductor.worker.pipeline.tensor_types import TensorType

FILL_BYTES = 512 << 20
"""More than any cache holds."""


class TestArgmax(ArgmaxScenes):
    pass


class TestFormats(FormatScenes):
    pass


class TestMatvec(MatvecScenes):
    @every_type
    @pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (4097, 14336), (1024, 4096)])
    def test_a_real_layers_product(
        self, bench: KernelBench, kind: TensorType, rows: int, columns: int
    ) -> None:
        self.check(bench, kind, rows, columns)

    @every_type
    @pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (4096, 14336), (4096, 4096)])
    def test_weights_are_read_far_faster_than_they_come(
        self, timer: KernelTimer, kind: TensorType, rows: int, columns: int
    ) -> None:
        n_bytes = rows * kind.row_bytes(columns)
        copies = max(4, FILL_BYTES // n_bytes)
        x, y = timer.memory(4 * columns), timer.memory(4 * rows)
        module, geometry = timer.gpu.module(kernel_source("matvec.cu")), matvec(rows)
        sizes = np.int32(rows), np.int32(columns)
        launches = [
            module.prepare(
                matvec_name(kind),
                geometry.grid,
                geometry.block,
                [timer.memory(n_bytes), x, y, 0, 0, *sizes],
            )
            for _ in range(copies)
        ]
        rate, fill = n_bytes / timer.ms(launches) * 1e3, timer.fill_bytes_per_s(FILL_BYTES)
        sys.stdout.write(
            f"\n{kind.name} {rows} x {columns}: {rate / 1e9:.0f} GB/s of weights, "
            f"memory is filled at {fill / 1e9:.0f} GB/s\n"
        )
        assert rate > fill / 10
