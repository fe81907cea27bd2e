"""The operations of a transformer layer in NumPy, float32: what kernels are compared with. *Pure.*

Activations are rows of tokens. Sources of the formulas: RMS norm https://arxiv.org/abs/1910.07467,
rotary embedding https://arxiv.org/abs/2104.09864, grouped-query attention
https://arxiv.org/abs/2305.13245, gated feed-forward https://arxiv.org/abs/2002.05202.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.dequantise import dequantise

__all__ = ["attention", "dequantise", "gated", "linear", "rms_norm", "rope", "softmax", "store_kv"]

Values = NDArray[np.float32]
Halves = NDArray[np.float16]
Indices = NDArray[np.int32]

_FEW_TOKENS = 16


def rms_norm(x: Values, weight: Values, eps: float, add: Values | None = None) -> Values:
    """x / sqrt(mean(x²) + eps) · weight over the last axis; ``add`` + that, where given."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    normed: Values = x / np.sqrt(mean + np.float32(eps)) * weight
    return normed if add is None else add + normed


def linear(
    x: Values, weight: Values, bias: Values | None = None, add: Values | None = None
) -> Values:
    """x · weightᵀ + bias + add: (tokens, columns) and (rows, columns) -> (tokens, rows)."""
    # Few tokens are not worth the threads of a matrix product: where cores are busy, waiting for
    # them takes a hundred times as long as the product.
    few = len(x) <= _FEW_TOKENS
    y: Values = np.vecdot(weight, x[:, None]) if few else x @ weight.T
    if bias is not None:
        y += bias
    if add is not None:
        y += add
    return y


def rope(
    x: Values,
    positions: Indices,
    inverse_frequencies: Values,
    magnitude: float,
    pairs: Literal["adjacent", "halves"],
) -> Values:
    """Turn each pair of values of a head by position × the pair's frequency.

    Args:
        x: (tokens, heads, head_dim).
        positions: (tokens,).
        inverse_frequencies: radians per position, (n_rot / 2,); n_rot <= head_dim, values
            beyond n_rot stay.
        magnitude: factor of the turned values.
        pairs: value 2 i with 2 i + 1 (``adjacent``), or i with i + n_rot / 2 (``halves``).
    """
    half = len(inverse_frequencies)
    # Float64 angles: at position 100,000 a float32 one is wrong by 0.004 radians.
    angles = positions[:, None, None].astype(np.float64) * inverse_frequencies
    cos = (np.cos(angles) * magnitude).astype(np.float32)
    sin = (np.sin(angles) * magnitude).astype(np.float32)
    if pairs == "adjacent":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y


def store_kv(
    k: Values, v: Values, k_cache: Halves, v_cache: Halves, positions: Indices, sequences: Indices
) -> None:
    """Put a layer's keys and values (tokens, kv_width) into the cache's float16 cells.

    The caches are (sequences, n_ctx, kv_width).
    """
    k_cache[sequences, positions] = k
    v_cache[sequences, positions] = v


def attention(
    q: Values,
    k_cache: Halves,
    v_cache: Halves,
    positions: Indices,
    sequences: Indices,
    n_head_kv: int,
    scale: float,
    window: int = 0,
) -> Values:
    """Causal attention of each token to the cached positions of its sequence, its own included.

    Args:
        q: (tokens, n_head, head_dim); heads share keys and values in groups of
            n_head / n_head_kv successive ones.
        k_cache, v_cache: (sequences, n_ctx, n_head_kv × head_dim).
        scale: factor of q · k before the softmax.
        window: only the last so many positions are seen, the token's own included; 0: all.

    Returns:
        (tokens, n_head × head_dim).
    """
    tokens, n_head, head_dim = q.shape
    out = np.empty((tokens, n_head * head_dim), np.float32)
    for sequence in np.unique(sequences):
        mine = np.flatnonzero(sequences == sequence)
        at = positions[mine]
        begin = max(0, int(at.min()) - window + 1) if window else 0
        cells = np.arange(begin, int(at.max()) + 1)
        shape = (len(cells), n_head_kv, 1, head_dim)
        keys = k_cache[sequence, cells].astype(np.float32).reshape(shape)
        values = v_cache[sequence, cells].astype(np.float32).reshape(shape)
        grouped = q[mine].reshape(len(mine), n_head_kv, n_head // n_head_kv, head_dim)
        # (kv head, head of the group, token, cell)
        scores = np.float32(scale) * (grouped.transpose(1, 2, 0, 3) @ keys.transpose(1, 2, 3, 0))
        seen = cells <= at[:, None]
        if window:
            seen &= cells > at[:, None] - window
        weights = softmax(np.where(seen, scores, np.float32(-np.inf)))
        mixed = weights @ values.transpose(1, 2, 0, 3)
        out[mine] = mixed.transpose(2, 0, 1, 3).reshape(len(mine), n_head * head_dim)
    return out


def softmax(x: Values) -> Values:
    """exp(x) / sum(exp(x)) over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Values = powers / powers.sum(axis=-1, keepdims=True)
    return result


def gated(gate: Values, up: Values, activation: Literal["silu", "gelu"]) -> Values:
    """activation(gate) · up; gelu is its tanh form (https://arxiv.org/abs/1606.08415)."""
    if activation == "silu":
        # Where exp overflows, gate / inf is the right limit: 0.
        with np.errstate(over="ignore"):
            active: Values = np.divide(gate, 1 + np.exp(-gate), dtype=np.float32)
    else:
        inner = np.float32(math.sqrt(2 / math.pi)) * gate * (1 + np.float32(0.044715) * gate**2)
        active = np.float32(0.5) * gate * (1 + np.tanh(inner))
    return active * up
