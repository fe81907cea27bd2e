"""attention.cu and mma.cu against softmax in float64.

What a token must not see is NaN in the cache: it would be seen in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_scenes import SEED, KernelBench, poisoned
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.attention_plan import (
    AttentionMemory,
    Heads,
    Part,
    launches,
    plan,
)
from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.launch_geometry import Geometry, values

MMA = kernel_source("mma.cu") + Path(__file__).with_name("mma.cu").read_text()
HALF_ERROR = 2.0**-11
"""Of rounding to float16, at most, relative."""

Floats = NDArray[np.float32]
Halves = NDArray[np.float16]


class Case:
    """Tokens, and a cache that holds what they see.

    Args:
        places: (sequence, position) of each token.
        spread: standard deviation of the scores, about.
    """

    def __init__(
        self,
        heads: Heads,
        places: Sequence[tuple[int, int]],
        window: int = 0,
        n_ctx: int = 0,
        spread: float = 2.0,
    ) -> None:
        rng = np.random.default_rng([SEED, heads.n_head, heads.head_dim, len(places)])
        self.heads, self.window = heads, window
        self.sequences, self.positions = np.array(places, np.int32).T.copy()
        self.n_ctx = n_ctx or int(self.positions.max()) + 1
        self.scale = 1 / np.sqrt(heads.head_dim)
        shape = len(places), heads.n_head, heads.head_dim
        self.q = rng.normal(0, spread, shape).astype(np.float32)
        cache = int(self.sequences.max()) + 1, self.n_ctx, heads.n_head_kv, heads.head_dim
        self.k_cache: NDArray[Any] = poisoned(*cache)
        self.v_cache: NDArray[Any] = poisoned(*cache)
        for cells in (self.k_cache, self.v_cache):
            for sequence in set(self.sequences.tolist()):
                mine = self.positions[self.sequences == sequence]
                first, end = self._seen(int(mine.min()))[0], int(mine.max()) + 1
                seen = end - first, *cache[2:]
                cells[sequence, first:end] = rng.normal(size=seen).astype(np.float16)
        self.k_cache, self.v_cache = (
            cells.astype(np.float16) for cells in (self.k_cache, self.v_cache)
        )

    def _seen(self, position: int) -> tuple[int, int]:
        return max(0, position - self.window + 1) if self.window else 0, position + 1

    def expected(
        self, q: Floats, relative: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The result, and how wrong it may be if weights are wrong by ``relative`` and scores, in
        float32, by 1e-6 of their size."""
        result, error = np.empty(q.shape), np.empty(q.shape)
        for sequence in np.unique(self.sequences):
            mine = np.flatnonzero(self.sequences == sequence)
            at, cells = self.positions[mine, None], np.arange(self.n_ctx)
            seen = (cells <= at) & (cells > at - (self.window or self.n_ctx))
            for head in range(self.heads.n_head):
                # What nobody sees is NaN, and has no weight.
                keys, stored = (
                    np.nan_to_num(cache[sequence, :, head // self.heads.group].astype(np.float64))
                    for cache in (self.k_cache, self.v_cache)
                )
                scores = q[mine, head].astype(np.float64) @ keys.T * self.scale
                scores = np.where(seen, scores, -np.inf)
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                weights /= weights.sum(axis=1, keepdims=True)
                result[mine, head] = weights @ stored
                largest = np.abs(np.where(seen, scores, 0)).max(axis=1, keepdims=True)
                error[mine, head] = (relative + 1e-6 * largest) * (weights @ np.abs(stored)) + 1e-6
        return result, error

    def check(self, bench: KernelBench, parts: Sequence[Part]) -> None:
        """Compute the parts; tokens in none of them must stay as they are."""
        out = poisoned(*self.q.shape)
        rows = (part.tokens * self.heads.n_head * part.splits for part in parts)
        scratch = poisoned(max(rows), self.heads.head_dim + 2)
        arrays: dict[int, NDArray[Any]] = {
            1: self.q,
            2: self.k_cache,
            3: self.v_cache,
            4: out,
            5: scratch,
            6: self.positions,
            7: self.sequences,
        }
        source = kernel_source("attention.cu", defines=self.heads.defines)
        for launch in launches(
            parts, self.heads, AttentionMemory(*arrays), self.n_ctx, self.scale, self.window
        ):
            # Addresses are plain integers; scalars are NumPy's.
            arguments = [
                arrays.get(value) if isinstance(value, int) else value for value in launch.arguments
            ]
            bench.launch(source, launch.kernel, launch.geometry, *arguments)
        seen = np.zeros(len(self.q), bool)
        for part in parts:
            mine = slice(part.first, part.first + part.tokens)
            seen[mine] = True
            if part.kernel == "attention_tile":
                # Queries and weights are float16 there: the queries' rounding is known.
                factor = np.float32(self.scale) * np.float32(np.log2(np.e))
                rounded = (self.q * factor).astype(np.float16).astype(np.float32) / factor
                expected, error = self.expected(rounded, 1.1 * HALF_ERROR)
            else:
                expected, error = self.expected(self.q, 1e-5)
            wrong = np.abs(out - expected)[mine] > error[mine]
            assert not wrong.any(), f"{out[mine][wrong]}, not {expected[mine][wrong]}"
        assert np.isnan(out[~seen]).all(), "a token of no part has a result"


def tile(case: Case, splits: int = 1) -> list[Part]:
    return [Part("attention_tile", 0, len(case.q), splits)]


def single(case: Case, splits: int = 1) -> list[Part]:
    return [Part("attention_split", 0, len(case.q), splits)]


def run(sequence: int, first: int, tokens: int) -> list[tuple[int, int]]:
    return [(sequence, first + token) for token in range(tokens)]


every_head = pytest.mark.parametrize(
    "heads",
    [
        Heads(8, 2, 128),
        Heads(9, 3, 64),
        Heads(4, 1, 256),
        Heads(3, 3, 96),
        Heads(14, 2, 32),
        Heads(16, 1, 80),
    ],
    ids=lambda heads: f"{heads.n_head}-{heads.n_head_kv}-{heads.head_dim}",
)

EIGHT = Heads(8, 2, 32)


class AttentionScenes:
    @every_head
    def test_a_prompt_from_its_start(self, bench: KernelBench, heads: Heads) -> None:
        case = Case(heads, run(0, 0, 43))
        case.check(bench, tile(case))

    @every_head
    def test_a_prompt_that_goes_on(self, bench: KernelBench, heads: Heads) -> None:
        case = Case(heads, run(1, 77, 20), n_ctx=100)
        case.check(bench, tile(case))

    @every_head
    def test_single_tokens_of_several_sequences(self, bench: KernelBench, heads: Heads) -> None:
        # The first position, and those around a block's steps and a tile.
        case = Case(heads, [(2, 0), (0, 1), (4, 31), (1, 32), (3, 63), (5, 150)], n_ctx=151)
        case.check(bench, single(case))

    # More splits than positions: some see nothing.
    @pytest.mark.parametrize("splits", [2, 3, 7])
    @pytest.mark.parametrize("window", [0, 70])
    def test_positions_are_split(self, bench: KernelBench, splits: int, window: int) -> None:
        heads = Heads(6, 2, 64)
        case = Case(heads, [(0, 0), (1, 4), (0, 129), (2, 200)], window)
        case.check(bench, single(case, splits))
        case = Case(heads, run(0, 0, 9) + run(1, 170, 31), window)
        case.check(bench, tile(case, splits))

    @pytest.mark.parametrize("window", [1, 2, 5, 63, 64, 65, 500])
    def test_a_window(self, bench: KernelBench, window: int) -> None:
        # Around the border, and far behind it.
        at = [0, window - 2, window - 1, window, window + 1, window + 130]
        case = Case(EIGHT, [(i, max(0, position)) for i, position in enumerate(at)], window)
        case.check(bench, single(case))
        for first in (0, max(0, window - 5), window + 100):
            case = Case(EIGHT, run(0, first, 21), window)
            case.check(bench, tile(case))

    def test_a_tile_may_be_of_several_sequences(self, bench: KernelBench) -> None:
        places = run(1, 0, 3) + run(0, 90, 14) + run(2, 5, 1) + run(1, 3, 9) + run(3, 20, 25)
        case = Case(EIGHT, places)
        case.check(bench, tile(case))

    def test_tokens_may_come_in_any_order(self, bench: KernelBench) -> None:
        rng = np.random.default_rng(SEED)
        case = Case(EIGHT, [run(0, 40, 30)[i] for i in rng.permutation(30)])
        case.check(bench, tile(case))

    @pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
    def test_the_last_tile_is_not_full(self, bench: KernelBench, tokens: int) -> None:
        case = Case(EIGHT, run(0, 60, tokens))
        case.check(bench, tile(case))

    @pytest.mark.parametrize("kernel", ["attention_tile", "attention_split"])
    @pytest.mark.parametrize("splits", [1, 2])
    def test_a_part_leaves_other_tokens_alone(
        self, bench: KernelBench, kernel: str, splits: int
    ) -> None:
        case = Case(EIGHT, run(0, 0, 40))
        case.check(bench, [Part(kernel, 11, 18, splits)])

    # One position takes all; sums of many weights; scores far below and above what exp can say.
    @pytest.mark.parametrize("spread", [0.01, 30.0, 3000.0])
    def test_scores_of_any_size(self, bench: KernelBench, spread: float) -> None:
        case = Case(EIGHT, run(0, 100, 12), spread=spread)
        case.check(bench, tile(case))
        case.check(bench, single(case, 2))

    def test_a_mixed_batch_as_it_is_planned(self, bench: KernelBench) -> None:
        places = [(4, 300), (5, 0), *run(0, 0, 30), *run(1, 250, 20), (2, 17), (3, 280)]
        heads = Heads(4, 2, 32)
        for window in (0, 290):
            case = Case(heads, places, window)
            parts = plan(case.positions, case.sequences, heads, window, 132)
            kernels = [part.kernel for part in parts]
            assert kernels == ["attention_split", "attention_tile", "attention_split"]
            case.check(bench, parts)

    def test_a_long_context_as_it_is_planned(self, bench: KernelBench) -> None:
        heads = Heads(4, 2, 32)
        for places in ([(0, 1100)], run(0, 1100, 10)):
            case = Case(heads, places)
            parts = plan(case.positions, case.sequences, heads, 0, 132)
            assert parts[0].splits > 1
            case.check(bench, parts)


class StoreScenes:
    def test_keys_and_values_come_into_their_cells(self, bench: KernelBench) -> None:
        rng = np.random.default_rng(SEED)
        n_ctx, kv_width = 19, 96
        places = np.array([(2, 18), (0, 0), (0, 1), (1, 7), (2, 0)], np.int32)
        sequence, position = places.T.copy()
        k, v = rng.normal(0, 9, (2, len(places), kv_width)).astype(np.float32)
        k_cache, v_cache = (poisoned(3, n_ctx, kv_width).astype(np.float16) for _ in range(2))
        bench.launch(
            kernel_source("attention.cu"),
            "store_kv",
            values(len(places) * kv_width),
            k,
            v,
            k_cache,
            v_cache,
            position,
            sequence,
            *(np.int32(size) for size in (len(places), n_ctx, kv_width)),
        )
        for cache, rows in ((k_cache, k), (v_cache, v)):
            np.testing.assert_array_equal(cache[sequence, position], rows.astype(np.float16))
            cache[sequence, position] = np.nan
            assert np.isnan(cache).all(), "another cell was written"


class MmaScenes:
    @pytest.mark.parametrize("name", ["mma_16816", "mma_by_shuffles"])
    def test_a_tiles_product(self, bench: KernelBench, name: str) -> None:
        rng = np.random.default_rng(SEED)
        a = rng.normal(size=(3, 16, 16)).astype(np.float16)
        b = rng.normal(size=(3, 16, 8)).astype(np.float16)
        c, d = rng.normal(size=(3, 16, 8)).astype(np.float32), poisoned(3, 16, 8)
        bench.launch(MMA, f"product_{name}", Geometry((3,), (32,)), a, b, c, d)
        expected = a.astype(np.float64) @ b.astype(np.float64) + c
        np.testing.assert_allclose(d, expected, rtol=0, atol=1e-5)
