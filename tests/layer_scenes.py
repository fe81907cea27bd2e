"""norm.cu, rope.cu and gated.cu against their formulas in float64."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from kernel_scenes import SEED, KernelBench, poisoned
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.launch_geometry import rms_norm, rope, values

NORM, ROPE, GATED = (kernel_source(name) for name in ("norm.cu", "rope.cu", "gated.cu"))

Values = NDArray[np.float32]


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> Values:
    rng = np.random.default_rng([SEED, seed, *shape])
    return rng.normal(0, scale, shape).astype(np.float32)


class NormScenes:
    # Less than a warp and just more; heads; rows of real models; the widest; what is not a
    # multiple of anything.
    @pytest.mark.parametrize("width", [1, 31, 33, 64, 96, 128, 256, 576, 1000, 4096, 8192, 8191])
    @pytest.mark.parametrize("with_add", [False, True])
    def test_rows(self, bench: KernelBench, width: int, with_add: bool) -> None:
        x, weight = random(5, width, scale=3.0), random(width, seed=1)
        add = random(5, width, scale=10.0, seed=2) if with_add else None
        y = poisoned(5, width)
        self.norm(bench, x, weight, add, y, 1e-5)
        self.check(y, x, weight, add, 1e-5)

    def test_the_result_may_replace_the_input(self, bench: KernelBench) -> None:
        x, weight = random(300, 128), random(128, seed=1)
        y = x.copy()
        self.norm(bench, y, weight, None, y, 1e-6)
        self.check(y, x, weight, None, 1e-6)

    def test_the_result_may_replace_the_residual(self, bench: KernelBench) -> None:
        x, weight, add = random(3, 640), random(640, seed=1), random(3, 640, seed=2)
        y = add.copy()
        self.norm(bench, x, weight, y, y, 1e-6)
        self.check(y, x, weight, add, 1e-6)

    def test_small_and_large_rows(self, bench: KernelBench) -> None:
        x = random(4, 2048)
        x *= np.array([1e-12, 1e-3, 1e6, 1e15], np.float32)[:, None]
        weight, y = random(2048, seed=1), poisoned(4, 2048)
        self.norm(bench, x, weight, None, y, 1e-6)
        self.check(y, x, weight, None, 1e-6)

    def test_a_row_of_zeros_stays_one(self, bench: KernelBench) -> None:
        y = poisoned(2, 64)
        self.norm(bench, np.zeros((2, 64), np.float32), random(64), None, y, 1e-6)
        np.testing.assert_array_equal(y, 0)

    def norm(
        self,
        bench: KernelBench,
        x: Values,
        weight: Values,
        add: Values | None,
        y: Values,
        eps: float,
    ) -> None:
        rows, width = x.shape
        sizes = np.int32(rows), np.int32(width), np.float32(eps)
        bench.launch(NORM, "rms_norm", rms_norm(rows, width), x, weight, add, y, *sizes)

    def check(self, y: Values, x: Values, weight: Values, add: Values | None, eps: float) -> None:
        exact = x.astype(np.float64)
        mean = np.mean(exact**2, axis=1, keepdims=True)
        expected = exact / np.sqrt(mean + float(np.float32(eps))) * weight
        size = np.abs(expected)
        if add is not None:
            expected, size = expected + add, size + np.abs(add)
        wrong = np.abs(y - expected) > 1e-6 * size
        assert not wrong.any(), f"{y[wrong]}, not {expected[wrong]}"


class RopeScenes:
    @pytest.mark.parametrize("pairs", ["adjacent", "halves"])
    @pytest.mark.parametrize(("head_dim", "n_rot"), [(64, 64), (128, 128), (96, 32), (256, 2)])
    def test_a_head_is_turned(
        self,
        bench: KernelBench,
        pairs: Literal["adjacent", "halves"],
        head_dim: int,
        n_rot: int,
    ) -> None:
        positions = [0, 1, 7, 500, 8191]
        self.check(bench, positions, 3, head_dim, n_rot, 1e4, 1.0, pairs, rtol=1e-6)

    @pytest.mark.parametrize("base", [1e4, 1e6])
    def test_far_positions(self, bench: KernelBench, base: float) -> None:
        # Beyond 105615 radians, sincosf reduces its argument in another way.
        positions = [32768, 65535, 105614, 105616, 131071]
        self.check(bench, positions, 2, 128, 128, base, 1.0, "halves", rtol=1e-6)

    def test_values_are_scaled_as_they_are_turned(self, bench: KernelBench) -> None:
        self.check(bench, [3, 77], 5, 64, 48, 1e4, 1.1902, "adjacent", rtol=1e-6)

    def check(
        self,
        bench: KernelBench,
        positions: list[int],
        heads: int,
        head_dim: int,
        n_rot: int,
        base: float,
        magnitude: float,
        pairs: Literal["adjacent", "halves"],
        rtol: float,
    ) -> None:
        tokens, half = len(positions), n_rot // 2
        x = random(tokens, heads, head_dim)
        frequencies = (base ** (-np.arange(half) / half)).astype(np.float32)
        angles = np.array(positions)[:, None, None] * frequencies.astype(np.float64)
        turns = np.exp(1j * angles) * float(np.float32(magnitude))
        expected = x.astype(np.float64)
        first, second = (
            (slice(0, n_rot, 2), slice(1, n_rot, 2))
            if pairs == "adjacent"
            else (slice(0, half), slice(half, n_rot))
        )
        turned = (expected[..., first] + 1j * expected[..., second]) * turns
        expected[..., first], expected[..., second] = turned.real, turned.imag

        y = x.copy()
        at = np.array(positions, np.int32)
        sizes = [np.int32(n) for n in (tokens, heads, head_dim, n_rot, pairs == "halves")]
        geometry = rope(tokens, heads, n_rot)
        bench.launch(ROPE, "rope", geometry, y, at, frequencies, np.float32(magnitude), *sizes)
        np.testing.assert_array_equal(y[..., n_rot:], x[..., n_rot:])
        np.testing.assert_allclose(y, expected, rtol=0, atol=rtol * np.abs(x).max())


class GatedScenes:
    @pytest.mark.parametrize("count", [1, 255, 257, 3 * 1536])
    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_values(
        self, bench: KernelBench, activation: Literal["silu", "gelu"], count: int
    ) -> None:
        gate, up = random(count, scale=4.0), random(count, seed=1)
        out = poisoned(count)
        self.gated(bench, gate, up, out, activation)
        np.testing.assert_allclose(out, self.formula(gate, up, activation), rtol=3e-6, atol=1e-9)

    @pytest.mark.parametrize("activation", ["silu", "gelu"])
    def test_values_that_overflow_on_the_way(
        self, bench: KernelBench, activation: Literal["silu", "gelu"]
    ) -> None:
        gate = np.array([-3e38, -1e20, -1e4, -89, -88, 0, 88, 89, 1e20, 1e38], np.float32)
        up, out = np.full(len(gate), 0.5, np.float32), poisoned(len(gate))
        self.gated(bench, gate, up, out, activation)
        np.testing.assert_allclose(out, self.formula(gate, up, activation), rtol=3e-6, atol=1e-30)

    def test_the_result_may_replace_the_gate(self, bench: KernelBench) -> None:
        gate, up = random(1000), random(1000, seed=1)
        out = gate.copy()
        self.gated(bench, out, up, out, "silu")
        np.testing.assert_allclose(out, self.formula(gate, up, "silu"), rtol=3e-6, atol=1e-9)

    def gated(
        self,
        bench: KernelBench,
        gate: Values,
        up: Values,
        out: Values,
        activation: Literal["silu", "gelu"],
    ) -> None:
        sizes = np.int64(len(gate)), np.int32(activation == "gelu")
        bench.launch(GATED, "gated", values(len(gate)), gate, up, out, *sizes)

    def formula(
        self, gate: Values, up: Values, activation: Literal["silu", "gelu"]
    ) -> NDArray[np.float64]:
        x = gate.astype(np.float64)
        with np.errstate(over="ignore"):
            if activation == "silu":
                return np.asarray(x / (1 + np.exp(-x)) * up)
            inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
            return np.asarray(0.5 * x * (1 + np.tanh(inner)) * up)
