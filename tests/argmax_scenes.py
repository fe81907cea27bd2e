"""argmax.cu: the most likely token, chunk of the head by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_scenes import SEED, KernelBench, poisoned
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.launch_geometry import argmax

ARGMAX = kernel_source("argmax.cu")

CHUNKS = ((7,), (1000,), (256, 256, 40), (1, 31, 33), (300, 5))
"""Rows: less than a warp, more than a block's threads, several chunks."""


class ArgmaxScenes:
    @pytest.mark.parametrize("chunks", CHUNKS)
    def test_the_largest(self, bench: KernelBench, chunks: tuple[int, ...]) -> None:
        logits = np.random.default_rng(SEED).normal(size=(6, sum(chunks))).astype(np.float32)
        logits[4] -= 1e6
        self.check(bench, logits, chunks)

    @pytest.mark.parametrize("chunks", CHUNKS)
    def test_of_equals_the_first(self, bench: KernelBench, chunks: tuple[int, ...]) -> None:
        rng = np.random.default_rng(SEED)
        self.check(bench, rng.integers(0, 2, (40, sum(chunks))).astype(np.float32), chunks)
        self.check(bench, np.full((2, sum(chunks)), -3, np.float32), chunks)

    @pytest.mark.parametrize("chunks", CHUNKS)
    def test_what_is_no_number_is_never_the_largest(
        self, bench: KernelBench, chunks: tuple[int, ...]
    ) -> None:
        rng = np.random.default_rng(SEED)
        logits = rng.normal(size=(12, sum(chunks))).astype(np.float32)
        logits[rng.random(logits.shape) < 0.5] = np.nan
        logits[-2], logits[-1] = np.nan, -np.inf
        self.check(bench, logits, chunks)

    def check(
        self, bench: KernelBench, logits: NDArray[np.float32], chunks: tuple[int, ...]
    ) -> None:
        tokens = len(logits)
        best, best_token = poisoned(tokens), np.full(tokens, -1, np.int32)
        first = 0
        for rows in chunks:
            chunk = np.ascontiguousarray(logits[:, first : first + rows])
            sizes = np.int32(first), np.int32(rows)
            bench.launch(ARGMAX, "argmax", argmax(tokens), chunk, best, best_token, *sizes)
            first += rows
        expected = np.where(np.isnan(logits), -np.inf, logits).argmax(axis=1)
        np.testing.assert_array_equal(best_token, expected)
