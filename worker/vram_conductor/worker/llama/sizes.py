"""Arithmetic of estimates: from log lines to bytes, and the largest pool that fits. *Pure*."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vram_conductor.protocol.limits import N_CTX_PAD
from vram_conductor.worker.llama.loglines import (
    ROUNDING_BYTES,
    CacheLine,
    parse_buffers,
    parse_caches,
)


@dataclass(frozen=True)
class PoolSizes:
    """What a context takes on the device, in bytes. ``compute_bytes`` holds the output buffer
    too where that lies on the device."""

    kv_bytes: int
    compute_bytes: int
    recurrent_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.kv_bytes + self.compute_bytes + self.recurrent_bytes


@dataclass(frozen=True)
class DryPool:
    """Result of a dry context: upper bounds of the sizes, and its caches one by one."""

    sizes: PoolSizes
    caches: tuple[CacheLine, ...]


def on_device(buffer: str, device_kind: Literal["cuda", "cpu"]) -> bool:
    """Whether a buffer of this name counts against the device: on cuda its own memory
    (``CUDA0``, not ``CUDA_Host``), on cpu all there is."""
    return device_kind == "cpu" or (
        buffer.startswith("CUDA") and not buffer.startswith("CUDA_Host")
    )


def measured_weights(lines: Iterable[str], device_kind: Literal["cuda", "cpu"]) -> int:
    """Bytes of the weight buffers that a real load logged."""
    return sum(
        line.bytes
        for line in parse_buffers(lines)
        if line.kind == "weights" and on_device(line.buffer, device_kind)
    )


def measured_pool(lines: Iterable[str], device_kind: Literal["cuda", "cpu"]) -> PoolSizes:
    """Bytes of the buffers that a real context logged."""
    sums = dict.fromkeys(("kv", "compute", "recurrent", "output", "weights"), 0)
    for line in parse_buffers(lines):
        if on_device(line.buffer, device_kind):
            sums[line.kind] += line.bytes
    return PoolSizes(sums["kv"], sums["compute"] + sums["output"], sums["recurrent"])


def dry_pool(lines: Sequence[str], device_kind: Literal["cuda", "cpu"]) -> DryPool:
    """Upper bounds from a dry context's log: every printed size is rounded up."""
    caches = tuple(parse_caches(lines))
    compute = sum(
        line.bytes + ROUNDING_BYTES
        for line in parse_buffers(lines)
        if line.kind in ("compute", "output") and on_device(line.buffer, device_kind)
    )
    kv = sum(cache.bytes + ROUNDING_BYTES for cache in caches if cache.kind == "kv")
    recurrent = sum(cache.bytes + ROUNDING_BYTES for cache in caches if cache.kind == "recurrent")
    return DryPool(PoolSizes(kv, compute, recurrent), caches)


def state_bytes(caches: Sequence[CacheLine], n_tokens: int, *, n_swa: int) -> int:
    """Upper bound of one sequence's state with ``n_tokens`` tokens (llama.cpp's
    ``state_write`` of its KV and recurrent caches).

    Sixteen bytes (our header; magic, sequence id); per KV cache 16 (streams, cells, v_trans,
    layers), per cell 24 (position, number of sequences, sequence, and for some architectures a
    2D position and a token), the cell's rows of K and V, and 24 per layer (types and row
    sizes); a window cache writes the window only. Per recurrent cache 20, one row of R and S per
    layer and 36 per layer.
    """
    total = 16
    for cache in caches:
        size = cache.bytes + ROUNDING_BYTES
        if cache.kind == "recurrent":
            total += 20 + -(-size // max(1, cache.cells)) + 36 * cache.layers
            continue
        cells = min(n_tokens, cache.cells)
        if cache.window:
            cells = min(cells, n_swa)
        rows = -(-size * cells // max(1, cache.cells))
        total += 16 + rows + cells * 24 + 24 * cache.layers
    return total


def largest_fitting(pool_bytes: Callable[[int], int], fit_bytes: int, limit_cells: int) -> int:
    """Largest multiple of 256 cells, at most ``limit_cells``, whose pool takes at most
    ``fit_bytes``; 0 if not even 256 do.

    ``pool_bytes(cells)`` must not decrease; it is nearly linear, so a secant finds the place in
    a few calls and the answer is exact: it fits, and the next multiple does not.
    """
    low, high = 1, limit_cells // N_CTX_PAD
    if high < 1:
        return 0
    low_bytes = pool_bytes(N_CTX_PAD)
    if low_bytes > fit_bytes:
        return 0
    # Never ask for a context far beyond the budget: its bookkeeping alone costs host memory.
    second = min(high, 16)
    high_bytes = pool_bytes(second * N_CTX_PAD)
    while high_bytes <= fit_bytes:
        low, low_bytes = second, high_bytes
        if second == high:
            return high * N_CTX_PAD
        second = min(high, second * 4)
        high_bytes = pool_bytes(second * N_CTX_PAD)
    high = second
    halve = False
    while high - low > 1:
        # Every other step is a secant; the halving between bounds the number of calls.
        slope = (high_bytes - low_bytes) / (high - low)
        guess = low + int((fit_bytes - low_bytes) / slope) if slope > 0 else low
        middle = (low + high) // 2 if halve else min(max(guess, low + 1), high - 1)
        halve = not halve
        size = pool_bytes(middle * N_CTX_PAD)
        if size <= fit_bytes:
            low, low_bytes = middle, size
        else:
            high, high_bytes = middle, size
    return low * N_CTX_PAD
