"""Arithmetic of estimates: from log lines to bytes, and the largest pool that fits. *Pure*."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from vram_conductor.protocol.limits import N_CTX_PAD
from vram_conductor.protocol.values import KVType
from vram_conductor.worker.llama.loglines import (
    ROUNDING_BYTES,
    CacheLine,
    parse_buffers,
    parse_caches,
)

GRANULE_BYTES = 2 << 20
"""A GPU's memory is given out in pieces of this size, by ``cudaMalloc`` (as NVML shows it) and by
``cuMemCreate`` alike."""

_BLOCKS: dict[KVType, int] = {"f32": 32 * 4, "f16": 32 * 2, "q8_0": 34, "q4_0": 18}
"""Bytes of 32 elements: rows of K and V are whole multiples of it."""

_FLASH = re.compile(r"Flash Attention enabled|flash_attn\s*= enabled")

_PADDING_BYTES = 512 * 34 // 32 + 128
"""ggml-cuda pads the last row of a quantised tensor to 512 elements, and aligns tensors to 128
bytes (``ggml_backend_cuda_buffer_type_get_alloc_size``)."""


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
    """Result of a dry context: upper bounds of the sizes, and its caches one by one. ``flash``:
    attention runs in one kernel."""

    sizes: PoolSizes
    caches: tuple[CacheLine, ...]
    flash: bool = True


def on_device(buffer: str, device_kind: Literal["cuda", "cpu"]) -> bool:
    """Whether a buffer of this name counts against the device: on cuda its own memory
    (``CUDA0``, not ``CUDA_Host``), on cpu all there is."""
    return device_kind == "cpu" or (
        buffer.startswith("CUDA") and not buffer.startswith("CUDA_Host")
    )


def allocated(size: int, device_kind: Literal["cuda", "cpu"]) -> int:
    """What an allocation of ``size`` bytes takes from the device."""
    if device_kind == "cpu":
        return size
    return -(-size // GRANULE_BYTES) * GRANULE_BYTES


def _printed(size: int, device_kind: Literal["cuda", "cpu"]) -> int:
    """What a buffer takes whose size was printed. Most caches are whole granules: one that seems
    to be just that is."""
    if device_kind == "cpu":
        return size
    return allocated(max(0, size - ROUNDING_BYTES), device_kind)


def cache_bytes(cache: CacheLine, kv_type: KVType) -> int:
    """Upper bound of the buffer of a KV cache on a GPU, exact where its rows are multiples of 32
    elements."""
    cell = cache.cells * _BLOCKS[kv_type]
    size = round(cache.bytes / cell) * cell if cell else 0
    if abs(size - cache.bytes) > ROUNDING_BYTES or cell <= 2 * ROUNDING_BYTES:
        size = cache.bytes + ROUNDING_BYTES
    return size + (2 * cache.layers * _PADDING_BYTES if kv_type in ("q8_0", "q4_0") else 0)


def measured_weights(lines: Iterable[str], device_kind: Literal["cuda", "cpu"]) -> int:
    """Bytes of the weight buffers that a real load logged."""
    return sum(
        _printed(line.bytes, device_kind)
        for line in parse_buffers(lines)
        if line.kind == "weights" and on_device(line.buffer, device_kind)
    )


def measured_pool(lines: Iterable[str], device_kind: Literal["cuda", "cpu"]) -> PoolSizes:
    """Bytes of the buffers that a real context logged."""
    sums: dict[str, int] = dict.fromkeys(("kv", "compute", "recurrent", "output", "weights"), 0)
    for line in parse_buffers(lines):
        if on_device(line.buffer, device_kind):
            sums[line.kind] += _printed(line.bytes, device_kind)
    return PoolSizes(sums["kv"], sums["compute"] + sums["output"], sums["recurrent"])


def dry_pool(
    lines: Sequence[str], device_kind: Literal["cuda", "cpu"], kv_type: KVType = "f16"
) -> DryPool:
    """Upper bounds from a dry context's log: every printed size is rounded up."""
    caches = tuple(parse_caches(lines))
    compute = sum(
        allocated(line.bytes + ROUNDING_BYTES, device_kind)
        for line in parse_buffers(lines)
        if line.kind in ("compute", "output") and on_device(line.buffer, device_kind)
    )
    sums = {"kv": 0, "recurrent": 0}
    for cache in caches:
        size = cache.bytes + ROUNDING_BYTES
        if cache.kind == "kv" and device_kind == "cuda":
            size = cache_bytes(cache, kv_type)
        sums[cache.kind] += allocated(size, device_kind)
    sizes = PoolSizes(sums["kv"], compute, sums["recurrent"])
    return DryPool(sizes, caches, any(_FLASH.search(line) for line in lines))


_SLOT_COMPUTE_BYTES = 256 << 10
"""A slot more takes at most so much more for computing: 130 KiB were seen."""


def scale_slots(
    one: DryPool, two: DryPool, slots: int, device_kind: Literal["cuda", "cpu"]
) -> DryPool:
    """Upper bound for a recurrent model's pool of more than two slots, from those of one and two.

    Its recurrent caches have one row per slot; the other buffers grow by as much with every slot.
    """
    more = slots - 2
    kv = two.sizes.kv_bytes + more * max(0, two.sizes.kv_bytes - one.sizes.kv_bytes)
    compute = two.sizes.compute_bytes - one.sizes.compute_bytes
    compute = two.sizes.compute_bytes + more * max(compute, _SLOT_COMPUTE_BYTES)
    recurrent = sum(
        allocated((cache.bytes + ROUNDING_BYTES) * slots, device_kind)
        for cache in one.caches
        if cache.kind == "recurrent"
    )
    sizes = PoolSizes(kv, allocated(compute, device_kind), recurrent)
    return DryPool(sizes, one.caches, one.flash)


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
