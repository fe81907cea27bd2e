"""formats.cu and matvec.cu: every tensor type against the gguf package, which is not ours."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from kernel_scenes import SEED, KernelBench, poisoned
from numpy.typing import NDArray
from quantised_models import as_f32, random_rows

from vram_conductor.worker.pipeline.kernel_source import kernel_source, matvec_name
from vram_conductor.worker.pipeline.launch_geometry import Geometry, matvec
from vram_conductor.worker.pipeline.tensor_types import TensorType

every_type = pytest.mark.parametrize("kind", list(TensorType), ids=lambda kind: kind.name)

FORMATS = kernel_source("formats.cu") + Path(__file__).with_name("dequantise.cu").read_text()
MATVEC = kernel_source("matvec.cu")


def smallest_columns(kind: TensorType) -> int:
    return max(kind.block_values, 16)


def weights(
    kind: TensorType, rows: int, columns: int, seed: int = SEED
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Random rows as a file has them, and what the gguf package reads in them."""
    rng = np.random.default_rng([seed, kind, rows, columns])
    data = np.ascontiguousarray(random_rows(rng, kind, columns, np.ones(rows)))
    values = as_f32(data, gguf.GGMLQuantizationType(int(kind)))
    return data, values.reshape(rows, columns).astype(np.float64)


class FormatScenes:
    @every_type
    def test_a_type_is_read_as_the_gguf_package_reads_it(
        self, bench: KernelBench, kind: TensorType
    ) -> None:
        rows, columns = 5, 3 * smallest_columns(kind)
        data, values = weights(kind, rows, columns)
        got = poisoned(rows, columns)
        pieces = rows * columns // 16
        geometry = Geometry((-(-pieces // 64),), (64,))
        bench.launch(FORMATS, f"dequantise_{kind.name}", geometry, data, got, np.int32(pieces))
        # The package rounds once more where a value is a product and a sum.
        largest = np.abs(values).max()
        np.testing.assert_allclose(got, values, rtol=3e-7, atol=3e-7 * largest)

    def test_every_half_is_the_float_that_it_is(self, bench: KernelBench) -> None:
        bits = np.arange(1 << 16, dtype=np.uint16)
        y, back = poisoned(1 << 16), np.zeros(1 << 16, np.uint16)
        geometry = Geometry((256,), (256,))
        bench.launch(FORMATS, "halves_to_floats", geometry, bits, y, back, np.int32(1 << 16))
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(y, bits.view(np.float16).astype(np.float32))
        np.testing.assert_array_equal(back.view(np.float16), bits.view(np.float16))

    def test_a_float_is_rounded_to_the_nearest_half(self, bench: KernelBench) -> None:
        rng = np.random.default_rng(SEED)
        random = rng.normal(size=5000) * 10 ** rng.uniform(-9, 5, 5000)
        ties = [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519.0, 65520.0, -65520.0]
        x = np.array([*random, *ties, 0.0, -0.0, np.inf], np.float32)
        y = np.zeros(len(x), np.uint16)
        geometry = Geometry((-(-len(x) // 256),), (256,))
        bench.launch(FORMATS, "floats_to_halves", geometry, x, y, np.int32(len(x)))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(y.view(np.float16), x.astype(np.float16))


class MatvecScenes:
    @every_type
    # Less than a block's 8 rows, one more than them; less than a warp's pieces, some more.
    @pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 2), (9, 5), (33, 18)])
    def test_a_product(self, bench: KernelBench, kind: TensorType, rows: int, blocks: int) -> None:
        self.check(bench, kind, rows, blocks * smallest_columns(kind))

    @every_type
    def test_bias_and_residual_are_added(self, bench: KernelBench, kind: TensorType) -> None:
        for bias, add in ((True, False), (False, True), (True, True)):
            self.check(bench, kind, 19, 2 * smallest_columns(kind), bias=bias, add=add)

    def test_the_residual_may_be_the_result(self, bench: KernelBench) -> None:
        kind, rows, columns = TensorType.Q4_0, 21, 64
        data, values = weights(kind, rows, columns)
        rng = np.random.default_rng(SEED)
        x, y = (rng.normal(size=n).astype(np.float32) for n in (columns, rows))
        expected = values @ x + y
        sizes = np.int32(rows), np.int32(columns)
        bench.launch(MATVEC, matvec_name(kind), matvec(rows), data, x, y, None, y, *sizes)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)

    def check(
        self,
        bench: KernelBench,
        kind: TensorType,
        rows: int,
        columns: int,
        bias: bool = False,
        add: bool = False,
    ) -> None:
        data, values = weights(kind, rows, columns)
        rng = np.random.default_rng([SEED, 1])
        x = rng.normal(size=columns).astype(np.float32)
        bias_of, add_of = (rng.normal(0, 10, rows).astype(np.float32) for _ in range(2))
        expected = values @ x.astype(np.float64) + bias * bias_of + add * add_of
        y = poisoned(rows)
        bench.launch(
            MATVEC,
            matvec_name(kind),
            matvec(rows),
            data,
            x,
            y,
            bias_of if bias else None,
            add_of if add else None,
            np.int32(rows),
            np.int32(columns),
        )
        # Float32 sums: their error grows with the sum of the products' sizes.
        sizes = np.abs(values) @ np.abs(x.astype(np.float64)) + np.abs(expected)
        wrong = ~(np.abs(y - expected) <= 1e-6 * sizes)  # NaN is wrong, too
        assert not wrong.any(), f"rows {np.flatnonzero(wrong)}: {y[wrong]}, not {expected[wrong]}"
