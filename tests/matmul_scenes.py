"""matmul.cu: every tensor type and every tile, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_scenes import SEED, KernelBench, poisoned
from matvec_scenes import every_type, smallest_columns, weights
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.matmul_geometry import TILE_ROWS, to_half, with_tile
from vram_conductor.worker.pipeline.tensor_types import TensorType

Values = NDArray[np.float32]

RELATIVE_ERROR = 1e-3
"""Of a token's product as a whole (L2). Weights and activations become f16: 3e-4 is usual."""

every_tile = pytest.mark.parametrize("tile", TILE_ROWS)


class MatmulScenes:
    """``defines``: put before the kernels."""

    defines = ""
    tensor_cores = True

    @every_type
    @every_tile
    def test_a_product(self, bench: KernelBench, kind: TensorType, tile: int) -> None:
        # More than a tile of rows and of tokens, and the last tile, step and round not in full.
        columns = max(7 * 32, 3 * kind.block_values)
        self.check(bench, kind, tile, TILE_ROWS[tile] + 9, columns, tile + 3)

    @every_tile
    @pytest.mark.parametrize(
        ("kind", "columns"),
        [
            (TensorType.Q4_0, 32),
            (TensorType.Q8_0, 1056),
            (TensorType.Q4_1, 576),
            (TensorType.F16, 96),
            (TensorType.Q6_K, 256),
            (TensorType.Q4_K, 1280),
        ],
        ids=lambda value: getattr(value, "name", value),
    )
    def test_less_than_a_tile(
        self, bench: KernelBench, tile: int, kind: TensorType, columns: int
    ) -> None:
        # As few columns as there can be, and as many as are no multiple of what 8 warps take.
        for rows, tokens in ((1, 1), (7, 2)):
            self.check(bench, kind, tile, rows, columns, tokens)

    @every_tile
    def test_a_block_writes_its_own_tile_and_nothing_else(
        self, bench: KernelBench, tile: int
    ) -> None:
        rng = np.random.default_rng(SEED)
        kind, rows, columns, tokens = TensorType.Q8_0, 3 * TILE_ROWS[tile], 64, 3 * tile
        data, _ = weights(kind, rows, columns)
        x = rng.normal(size=(tokens, columns)).astype(np.float32)
        y = poisoned(tokens, rows)
        self.product(bench, kind, tile, data, x, y, grid=(1, 1))
        written = ~np.isnan(y)
        assert written[:tile, : TILE_ROWS[tile]].all()
        assert written.sum() == tile * TILE_ROWS[tile]

    @every_type
    def test_bias_and_residual_are_added(self, bench: KernelBench, kind: TensorType) -> None:
        columns = smallest_columns(kind) * 2
        for bias, add in ((True, False), (False, True), (True, True)):
            self.check(bench, kind, 8, 19, columns, 5, bias=bias, add=add)

    def test_the_residual_may_be_the_result(self, bench: KernelBench) -> None:
        rng = np.random.default_rng(SEED)
        kind, rows, columns, tokens = TensorType.Q4_0, 21, 64, 9
        data, values = weights(kind, rows, columns)
        x = rng.normal(size=(tokens, columns)).astype(np.float32)
        y = rng.normal(size=(tokens, rows)).astype(np.float32)
        expected = x @ values.T + y
        self.product(bench, kind, 16, data, x, y, None, y)
        assert np.linalg.norm(y - expected) < RELATIVE_ERROR * np.linalg.norm(expected)

    @every_tile
    def test_equal_inputs_give_equal_outputs(self, bench: KernelBench, tile: int) -> None:
        self.check_repeats(bench, tile, 2 * TILE_ROWS[tile], 768, 2 * tile, 2)

    @pytest.mark.parametrize("kind", [TensorType.Q4_0, TensorType.Q4_K], ids=lambda k: k.name)
    def test_activations_of_all_sizes_in_one_token(
        self, bench: KernelBench, kind: TensorType
    ) -> None:
        """A few are very large, as in real models; also where the weights spare those few."""
        rng = np.random.default_rng(SEED)
        rows, columns, tokens = 40, 512, 12
        data, values = weights(kind, rows, columns)
        sizes = 10 ** rng.uniform(-3, 5, (tokens, columns))
        x = (sizes * rng.choice([-1, 1], sizes.shape)).astype(np.float32)
        self.check_of(bench, kind, 16, data, values, x)
        # Tokens of very different sizes, each of them to the same relative error.
        x = rng.normal(size=(tokens, columns)) * 10 ** rng.uniform(-30, 30, (tokens, 1))
        self.check_of(bench, kind, 16, data, values, x.astype(np.float32))
        # f16's range has room for what is 10^8 times smaller than the token's largest value.
        block = data.reshape(rows, -1, kind.block_bytes)
        block[:, 0] = 0  # factors, too: these values are 0
        values[:, : kind.block_values] = 0
        x = rng.normal(size=(tokens, columns)) * 1e-3
        x[:, : kind.block_values] *= 1e8
        self.check_of(bench, kind, 16, data, values, x.astype(np.float32))

    def test_to_half_is_exact_but_for_the_rounding(self, bench: KernelBench) -> None:
        rng = np.random.default_rng(SEED)
        columns = 1100
        x = np.concatenate(
            [
                rng.normal(size=(6, columns))
                * 10.0 ** np.array([[-37], [-9], [-3], [0], [5], [37]]),
                rng.choice([-1, 1], (1, columns)) * 10 ** rng.uniform(-6, 6, columns),
                np.full((1, columns), np.finfo(np.float32).max),
                np.full((1, columns), 1e-45),
                np.zeros((1, columns)),
                np.eye(1, columns, columns - 1) * -65520,
            ]
        ).astype(np.float32)
        half, scale = self.to_half(bench, x)
        largest = np.abs(x / scale[:, None]).max(axis=1)
        np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)  # powers of two
        normal = np.abs(x).max(axis=1) > 1e-33
        assert (largest[normal] >= 2**14).all()
        assert (largest < 2**15).all()
        # What is below the normal numbers may count as 0: CuPy has kernels compiled so.
        flushed = np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x)
        exact, without = ((values / scale[:, None]).astype(np.float16) for values in (x, flushed))
        np.testing.assert_array_equal(half, np.where(half == exact, exact, without))

    def test_to_half_keeps_what_is_no_number(self, bench: KernelBench) -> None:
        x = np.ones((3, 32), np.float32)
        x[0, 5], x[1, 6], x[2, 7] = np.nan, np.inf, -np.inf
        half, _ = self.to_half(bench, x)
        np.testing.assert_array_equal(np.isnan(half), np.isnan(x))
        np.testing.assert_array_equal(np.isinf(half), np.isinf(x))

    def check(
        self,
        bench: KernelBench,
        kind: TensorType,
        tile: int,
        rows: int,
        columns: int,
        tokens: int,
        bias: bool = False,
        add: bool = False,
    ) -> None:
        data, values = weights(kind, rows, columns)
        rng = np.random.default_rng([SEED, 1])
        x = rng.normal(size=(tokens, columns)).astype(np.float32)
        bias_of = rng.normal(0, 10, rows).astype(np.float32) if bias else None
        add_of = rng.normal(0, 10, (tokens, rows)).astype(np.float32) if add else None
        self.check_of(bench, kind, tile, data, values, x, bias_of, add_of)

    def check_repeats(
        self, bench: KernelBench, tile: int, rows: int, columns: int, tokens: int, times: int
    ) -> None:
        """To the last bit: a race would show."""
        kind = TensorType.Q4_1
        data, _ = weights(kind, rows, columns)
        x = np.random.default_rng(SEED).normal(size=(tokens, columns)).astype(np.float32)
        results = [poisoned(tokens, rows) for _ in range(times)]
        for y in results:
            self.product(bench, kind, tile, data, x, y)
            np.testing.assert_array_equal(y, results[0])

    def check_of(
        self,
        bench: KernelBench,
        kind: TensorType,
        tile: int,
        data: NDArray[np.uint8],
        values: NDArray[np.float64],
        x: Values,
        bias: Values | None = None,
        add: Values | None = None,
    ) -> None:
        y = poisoned(len(x), len(values))
        self.product(bench, kind, tile, data, x, y, bias, add)
        wide = x.astype(np.float64)
        expected = wide @ values.T
        for more in (bias, add):
            expected = expected + (0 if more is None else more)
        # As large as the sum of the products is, were their signs random: it may cancel to nothing.
        sizes = np.sqrt(wide**2 @ (values**2).T)
        wrong = np.abs(y - expected)
        per_token = np.linalg.norm(wrong, axis=1) / np.linalg.norm(sizes, axis=1)
        assert (per_token < RELATIVE_ERROR).all(), per_token
        # No single one is off, either: a mistake in few places is small on the whole.
        off = wrong > 4 * RELATIVE_ERROR * sizes
        assert not off.any(), f"(token, row): {np.argwhere(off)[:8]}"

    def product(
        self,
        bench: KernelBench,
        kind: TensorType,
        tile: int,
        data: NDArray[np.uint8],
        x: Values,
        y: Values,
        bias: Values | None = None,
        add: Values | None = None,
        grid: tuple[int, ...] = (),
    ) -> None:
        half, scale = self.to_half(bench, x)
        tokens, rows = y.shape
        matmul = with_tile(tile, kind, rows, tokens, self.tensor_cores)
        sizes = np.int32(rows), np.int32(x.shape[1]), np.int32(tokens)
        geometry = replace(matmul.geometry, grid=grid or matmul.geometry.grid)
        arguments = data, half, scale, y, bias, add, *sizes
        bench.launch(self.source(), matmul.kernel, geometry, *arguments)

    def to_half(self, bench: KernelBench, x: Values) -> tuple[NDArray[np.float16], Values]:
        tokens, columns = x.shape
        half, scale = np.full(x.shape, np.nan, np.float16), poisoned(tokens)
        sizes = np.int32(tokens), np.int32(columns)
        bench.launch(self.source(), "to_half", to_half(tokens), x, half, scale, *sizes)
        return half, scale

    def source(self) -> str:
        return kernel_source("matmul.cu", defines=self.defines)


class PlainMatmulScenes(MatmulScenes):
    """What GPUs run that have no tensor cores for it."""

    defines = "#define MATMUL_PLAIN"
    tensor_cores = False
