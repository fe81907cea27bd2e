"""Mat-mul kernels on a real GPU: the scenes of tests/worker, and layers as large as real ones."""

from __future__ import annotations

import pytest
from kernel_scenes import KernelBench
from matmul_scenes import MatmulScenes, PlainMatmulScenes, every_tile
from matvec_scenes import every_type

from vram_conductor.worker.pipeline.matmul_geometry import tile_tokens
from vram_conductor.worker.pipeline.tensor_types import TensorType


class TestMatmul(MatmulScenes):
    @every_type
    @pytest.mark.parametrize("tokens", [5, 300])
    def test_a_real_layers_product(self, bench: KernelBench, kind: TensorType, tokens: int) -> None:
        tile = tile_tokens(4097, tokens, bench.gpu.multiprocessors)
        self.check(bench, kind, tile, 4097, 4096, tokens)

    @every_tile
    def test_a_real_layers_product_has_no_race(self, bench: KernelBench, tile: int) -> None:
        self.check_repeats(bench, tile, 4096, 4096, 200, 10)


class TestPlainMatmul(PlainMatmulScenes):
    pass
