"""Arithmetic of estimates, on invented numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.values import KVType
from vram_conductor.worker.llama.loglines import ROUNDING_BYTES, CacheLine
from vram_conductor.worker.llama.sizes import (
    GRANULE_BYTES,
    allocated,
    cache_bytes,
    largest_fitting,
    state_bytes,
)

MIB = 1 << 20


@given(
    base=st.integers(0, 1 << 32),
    per_cell=st.integers(0, 1 << 20),
    step_every=st.integers(1, 64),
    step=st.integers(0, 1 << 24),
    budget=st.integers(0, 1 << 42),
    limit=st.integers(0, 1 << 22),
)
def test_the_largest_pool_is_exact_and_soon_found(
    base: int, per_cell: int, step_every: int, step: int, budget: int, limit: int
) -> None:
    asked: list[int] = []

    def pool_bytes(cells: int) -> int:
        assert cells % 256 == 0
        assert 256 <= cells <= limit
        asked.append(cells)
        return base + cells * per_cell + cells // 256 // step_every * step

    fit = largest_fitting(pool_bytes, budget, limit)
    count = len(asked)
    top = limit // 256 * 256
    assert fit % 256 == 0
    assert fit <= top
    if fit:
        assert pool_bytes(fit) <= budget
    if fit + 256 <= top:
        assert pool_bytes(fit + 256) > budget
    assert count <= 2 * (limit // 256).bit_length() + 10


def test_a_linear_pool_takes_a_handful_of_probes() -> None:
    asked: list[int] = []

    def pool_bytes(cells: int) -> int:
        asked.append(cells)
        return 20 * MIB + cells * 23_040

    assert largest_fitting(pool_bytes, 1000 * MIB, 131_072) == 44_544
    assert len(asked) <= 10
    assert max(asked) < 4 * 44_544


def test_state_of_a_window_cache_stops_growing_at_the_window() -> None:
    full, window = CacheLine("kv", 64 * MIB, 4096, 4), CacheLine("kv", 32 * MIB, 1024, 20, True)
    sizes = [state_bytes([full, window], n, n_swa=512) for n in (256, 512, 513, 514)]
    per_cell = 64 * MIB // 4096 + 24
    assert abs((sizes[2] - sizes[1]) - per_cell) <= 2
    assert abs((sizes[3] - sizes[2]) - per_cell) <= 2
    assert sizes[1] - sizes[0] > 256 * per_cell


def test_state_of_a_recurrent_cache_does_not_grow() -> None:
    cache = CacheLine("recurrent", 8 * MIB, 4, 24)
    small, large = (state_bytes([cache], n, n_swa=0) for n in (1, 100_000))
    assert small == large
    assert 2 * MIB <= small <= 2 * MIB + 4096


@pytest.mark.parametrize(
    ("cells", "layers", "kv_type", "printed_mib", "takes_mib"),
    [
        # Seen on an H200: what NVML showed for the buffer.
        (2048, 24, "f16", 24.0, 24),
        (131_072, 32, "f16", 5120.0, 5120),
        (8192, 32, "q8_0", 170.0, 172),
        (131_072, 24, "q8_0", 816.0, 818),
    ],
)
def test_a_cache_on_a_gpu_takes_whole_granules(
    cells: int, layers: int, kv_type: KVType, printed_mib: float, takes_mib: int
) -> None:
    cache = CacheLine("kv", round(printed_mib * MIB), cells, layers)
    assert allocated(cache_bytes(cache, kv_type), "cuda") == takes_mib * MIB


@given(
    cells=st.integers(1, 512).map(lambda n: n * 256),
    layers=st.integers(1, 80),
    heads=st.integers(1, 16),
    head=st.sampled_from([40, 64, 80, 96, 128, 256]),
    kv_type=st.sampled_from(["f16", "f32", "q8_0", "q4_0"]),
)
def test_a_cache_is_never_estimated_too_small(
    cells: int, layers: int, heads: int, head: int, kv_type: KVType
) -> None:
    """ggml-cuda's own arithmetic (row padding, alignment) against what is read off the log."""
    block, elements = {"f16": (2, 1), "f32": (4, 1), "q8_0": (34, 32), "q4_0": (18, 32)}[kv_type]
    width = heads * head
    if width % elements:
        return
    tensor = width // elements * block * cells
    ragged = width % 512
    padding = (512 - ragged) // elements * block if ragged and kv_type[0] == "q" else 0
    real = 2 * layers * (-(-(tensor + padding) // 128) * 128)
    printed = round(round(2 * layers * tensor / MIB, 2) * MIB)
    bound = cache_bytes(CacheLine("kv", printed, cells, layers), kv_type)
    assert bound >= real
    assert bound - real <= 2 * layers * 1024 + 2 * ROUNDING_BYTES


@given(st.integers(0, 1 << 40))
def test_an_allocation_is_a_whole_number_of_granules(size: int) -> None:
    taken = allocated(size, "cuda")
    assert taken % GRANULE_BYTES == 0
    assert 0 <= taken - size < GRANULE_BYTES
    assert allocated(size, "cpu") == size
