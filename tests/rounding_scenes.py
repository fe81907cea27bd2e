"""rounding.cu: activations as llama.cpp itself rounds them."""

from __future__ import annotations

import numpy as np
import pytest
from ggml_quants import rounded
from kernel_scenes import SEED, KernelBench, poisoned
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.launch_geometry import rounding

SOURCE = kernel_source("rounding.cu")


def activations(n: int) -> NDArray[np.float32]:
    """Blocks of all sizes: one with an outlier, one of zeros, two too small for a scale in f16."""
    rng = np.random.default_rng([SEED, n])
    x = rng.normal(size=(n // 256, 256)) * 10.0 ** rng.uniform(-5, 4, (n // 256, 1))
    x[rng.integers(len(x)), rng.integers(256)] *= -1000
    x[1] = 0
    x[2] *= 1e-6 / np.abs(x[2]).max()
    x[3] *= 1e-38 / np.abs(x[3]).max()
    return x.astype(np.float32).ravel()


class RoundingScenes:
    @pytest.mark.parametrize(
        ("kernel", "grid"),
        [("round_q8_0", "q8_0"), ("round_q8_0", "q8_1"), ("round_q8_k", "q8_K")],
    )
    @pytest.mark.parametrize("blocks", [5, 67])
    def test_values_are_llama_cpps(
        self, bench: KernelBench, kernel: str, grid: str, blocks: int
    ) -> None:
        x = activations(256 * blocks)
        y = poisoned(x.size)
        bench.launch(SOURCE, kernel, rounding(kernel, x.size), x, y, np.int32(x.size))
        expected = rounded(x, grid)
        np.testing.assert_array_equal(y, expected)

    def test_halves_are_ieees(self, bench: KernelBench) -> None:
        x = activations(256 * 9)[:2300]
        y = poisoned(x.size)
        bench.launch(SOURCE, "round_f16", rounding("round_f16", x.size), x, y, np.int32(x.size))
        np.testing.assert_array_equal(y, x.astype(np.float16).astype(np.float32))

    def test_in_place(self, bench: KernelBench) -> None:
        for kernel, grid in (("round_q8_0", "q8_0"), ("round_q8_k", "q8_K")):
            x = activations(256 * 8)
            expected = rounded(x, grid)
            bench.launch(SOURCE, kernel, rounding(kernel, x.size), x, x, np.int32(x.size))
            np.testing.assert_array_equal(x, expected)
