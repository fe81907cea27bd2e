"""The layers' operations against plain formulas in float64, the formats against another reader."""

from __future__ import annotations

import math
from typing import Any, Literal

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from quantised_models import random_rows

from vram_conductor.worker.pipeline.dequantise import dequantise
from vram_conductor.worker.pipeline.reference import (
    attention,
    gated,
    linear,
    rms_norm,
    rope,
    softmax,
    store_kv,
)
from vram_conductor.worker.pipeline.tensor_types import TensorType

Pairs = Literal["adjacent", "halves"]


def values(seed: int, *shape: int, spread: float = 1.0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)


@pytest.mark.parametrize("kind", TensorType)
def test_formats_are_read_as_the_gguf_package_reads_them(kind: TensorType) -> None:
    """Random blocks, every bit of them used; both compute in float32, in another order."""
    rows, columns = 7, 768
    data = random_rows(np.random.default_rng(3), kind, columns, np.full(rows, 2.0))
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(kind)))
    found = dequantise(data.reshape(-1), kind, rows, columns)
    assert found.dtype == np.float32
    assert found.shape == (rows, columns)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())
    assert np.std(found) == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("kind", [kind for kind in TensorType if kind.block_values > 1])
@given(data=st.data())
def test_any_finite_block_is_read_so(kind: TensorType, data: st.DataObject) -> None:
    """The extremes, too: scales of 0, denormal and largest float16 numbers, all bits set."""
    block = np.frombuffer(
        data.draw(st.binary(min_size=kind.block_bytes, max_size=kind.block_bytes)), np.uint8
    )
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(block[None], gguf.GGMLQuantizationType(int(kind)))
        found = dequantise(block, kind, 1, kind.block_values)
    if np.isfinite(expected).all():
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", TensorType)
def test_rows_are_read_one_by_one_or_together(kind: TensorType) -> None:
    rows, columns = 5, 256
    data = random_rows(np.random.default_rng(4), kind, columns, np.ones(rows))
    together = dequantise(data.reshape(-1), kind, rows, columns)
    for at in range(rows):
        np.testing.assert_array_equal(together[at], dequantise(data[at], kind, 1, columns)[0])


def test_rms_norm() -> None:
    x, weight, add = values(1, 5, 96, spread=3.0), values(2, 96), values(3, 5, 96)
    for row, out, more in zip(
        x, rms_norm(x, weight, 1e-3), rms_norm(x, weight, 1e-3, add), strict=True
    ):
        mean = sum(float(v) ** 2 for v in row) / len(row)
        expected = row.astype(np.float64) / math.sqrt(mean + 1e-3) * weight
        np.testing.assert_allclose(out, expected, rtol=1e-5)
        np.testing.assert_allclose(
            more - expected, add[np.flatnonzero((x == row).all(1))[0]], atol=1e-5
        )


def test_rms_norm_of_zeros_is_zero_and_per_head() -> None:
    assert not rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-6).any()
    x, weight = values(5, 3, 4, 16), values(6, 16)
    by_head = rms_norm(x, weight, 1e-6)
    np.testing.assert_array_equal(by_head[1, 2], rms_norm(x[1, 2], weight, 1e-6))


@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_linear(tokens: int) -> None:
    x, weight = values(1, tokens, 33), values(2, 7, 33)
    bias, add = values(3, 7), values(4, tokens, 7)
    product = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(linear(x, weight), product, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(linear(x, weight, bias), product + bias, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        linear(x, weight, bias, add), product + bias + add, rtol=1e-4, atol=1e-5
    )


def turned(
    x: NDArray[np.float32], position: int, frequencies: Any, magnitude: float, pairs: Pairs
) -> NDArray[np.float64]:
    """One head, pair by pair, as complex numbers."""
    y, half = x.astype(np.float64), len(frequencies)
    for i, frequency in enumerate(frequencies):
        a, b = (2 * i, 2 * i + 1) if pairs == "adjacent" else (i, i + half)
        angle = position * float(frequency)
        number = complex(y[a], y[b]) * complex(math.cos(angle), math.sin(angle)) * magnitude
        y[a], y[b] = number.real, number.imag
    return y


@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize("n_rot", [16, 24])
def test_rope(pairs: Pairs, n_rot: int) -> None:
    """All of a head turns, or its first 16 of 24 values."""
    frequencies = (1e4 ** -(np.arange(n_rot // 2) / (n_rot // 2))).astype(np.float32)
    x, positions = values(1, 4, 3, 24), np.array([0, 1, 77, 131_071], np.int32)
    before = x.copy()
    y = rope(x, positions, frequencies, 1.25, pairs)
    np.testing.assert_array_equal(x, before)
    for token, position in enumerate(positions):
        for head in range(3):
            expected = turned(x[token, head], int(position), frequencies, 1.25, pairs)
            np.testing.assert_allclose(y[token, head], expected, atol=3e-6)


@given(
    at=st.integers(0, 4000),
    distance=st.integers(0, 4000),
    further=st.integers(0, 60_000),
    pairs=st.sampled_from(["adjacent", "halves"]),
)
def test_rope_tells_distances_only(at: int, distance: int, further: int, pairs: Pairs) -> None:
    frequencies = (1e4 ** -(np.arange(8) / 8)).astype(np.float32)
    q, k = values(1, 1, 1, 16), values(2, 1, 1, 16)

    def product(of_q: int, of_k: int) -> float:
        first, second = (
            rope(x, np.array([position], np.int32), frequencies, 1.0, pairs)
            for x, position in ((q, of_q), (k, of_k))
        )
        return float((first * second).sum())

    assert product(at + distance, at) == pytest.approx(
        product(at + distance + further, at + further), abs=1e-4
    )


def attended(
    q: NDArray[np.float32],
    keys: NDArray[np.float16],
    vals: NDArray[np.float16],
    position: int,
    scale: float,
    window: int,
) -> NDArray[np.float64]:
    """One head of one token over (n_ctx, head_dim) keys and values."""
    first = max(0, position - window + 1) if window else 0
    scores = [
        scale * float(q.astype(np.float64) @ keys[j].astype(np.float64))
        for j in range(first, position + 1)
    ]
    powers = [math.exp(score - max(scores)) for score in scores]
    total = np.zeros(len(q))
    for power, j in zip(powers, range(first, position + 1), strict=True):
        total += power * vals[j].astype(np.float64)
    return total / sum(powers)


@pytest.mark.parametrize("window", [0, 1, 5, 64])
@pytest.mark.parametrize("n_head_kv", [1, 2, 6])
def test_attention(window: int, n_head_kv: int) -> None:
    """Sequences with ragged positions, in any order; cells that may not be seen are poison."""
    n_head, head_dim, n_ctx, sequences_count = 6, 16, 40, 4
    kv_width = n_head_kv * head_dim
    positions = np.array([7, 30, 0, 8, 31, 32, 6], np.int32)
    sequences = np.array([1, 3, 0, 1, 3, 3, 1], np.int32)
    k_cache = np.full((sequences_count, n_ctx, kv_width), np.nan, np.float16)
    v_cache = k_cache.copy()
    for sequence in range(sequences_count):
        seen = positions[sequences == sequence]
        if len(seen):
            first = max(0, seen.min() - window + 1) if window else 0
            cells = slice(first, seen.max() + 1)
            k_cache[sequence, cells] = values(sequence, n_ctx, kv_width)[cells]
            v_cache[sequence, cells] = values(9 + sequence, n_ctx, kv_width)[cells]
    q = values(20, len(positions), n_head, head_dim, spread=2.0)
    out = attention(q, k_cache, v_cache, positions, sequences, n_head_kv, 0.3, window)
    assert out.shape == (len(positions), n_head * head_dim)
    for token, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
        for head in range(n_head):
            of = head // (n_head // n_head_kv) * head_dim
            keys, vals = (c[sequence, :, of : of + head_dim] for c in (k_cache, v_cache))
            expected = attended(q[token, head], keys, vals, int(position), 0.3, window)
            found = out[token, head * head_dim : (head + 1) * head_dim]
            np.testing.assert_allclose(found, expected, atol=3e-6)


def test_store_kv_rounds_to_half_and_touches_nothing_else() -> None:
    k, v = values(1, 3, 8), values(2, 3, 8)
    positions, sequences = np.array([5, 0, 6], np.int32), np.array([1, 0, 1], np.int32)
    k_cache, v_cache = np.zeros((2, 9, 8), np.float16), np.zeros((2, 9, 8), np.float16)
    store_kv(k, v, k_cache, v_cache, positions, sequences)
    for cache, stored in ((k_cache, k), (v_cache, v)):
        for row, position, sequence in zip(stored, positions, sequences, strict=True):
            np.testing.assert_array_equal(cache[sequence, position], row.astype(np.float16))
        assert np.count_nonzero(cache.any(axis=-1)) == 3


def test_softmax_of_large_numbers() -> None:
    x = np.array([[1e4, 1e4 - 1, -np.inf], [-1e4, -1e4, -1e4]], np.float32)
    share = 1 / (1 + math.exp(-1))
    expected = [[share, 1 - share, 0], [1 / 3] * 3]
    np.testing.assert_allclose(softmax(x), expected, rtol=1e-6)


def test_gated() -> None:
    gate = np.concatenate([values(1, 64, spread=4.0), [-200.0, -90.0, 0.0, 90.0, 200.0]]).astype(
        np.float32
    )
    up = values(2, len(gate))

    def silu(x: float) -> float:
        return x / (1 + math.exp(-x)) if x > -700 else 0.0

    def gelu(x: float) -> float:
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    for activation, plain in (("silu", silu), ("gelu", gelu)):
        expected = [plain(float(a)) * float(b) for a, b in zip(gate, up, strict=True)]
        found = gated(gate, up, activation)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
