"""Which mat-mul kernel is launched, and how."""

from __future__ import annotations

import re
from importlib.resources import files

import nvrtc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.pipeline.kernel_source import kernel_source, matvec_name
from vram_conductor.worker.pipeline.matmul_geometry import TILE_ROWS, matmul, tile_tokens, with_tile
from vram_conductor.worker.pipeline.tensor_types import TensorType

SHARED_BYTES = 99 << 10
"""Dynamic shared memory that a block can have from compute capability 8.0 on, at least (8.6)."""

rows_of = st.integers(1, 300_000)
tokens_of = st.integers(1, 5_000)


@given(st.sampled_from(TensorType), rows_of, tokens_of, st.integers(1, 200), st.booleans())
def test_tiles_cover_the_result_and_none_lies_outside(
    kind: TensorType, rows: int, tokens: int, multiprocessors: int, tensor_cores: bool
) -> None:
    it = matmul(kind, rows, tokens, multiprocessors=multiprocessors, tensor_cores=tensor_cores)
    tile = tile_tokens(rows, tokens, multiprocessors)
    assert it.kernel == f"matmul_{kind.name.lower()}_{tile}"
    across, along = it.geometry.grid
    assert (across - 1) * tile < tokens <= across * tile
    assert (along - 1) * TILE_ROWS[tile] < rows <= along * TILE_ROWS[tile]
    assert along <= 65535
    assert it.geometry.shared_bytes <= (SHARED_BYTES if tensor_cores else 0)


@given(rows_of, tokens_of, st.integers(1, 200))
def test_no_larger_tile_than_the_tokens_fill(rows: int, tokens: int, multiprocessors: int) -> None:
    tile = tile_tokens(rows, tokens, multiprocessors)
    smaller = [each for each in TILE_ROWS if each < tile and TILE_ROWS[each] <= TILE_ROWS[tile]]
    assert all(tokens > each for each in smaller)


@pytest.mark.parametrize(
    ("rows", "tokens", "tile"),
    [
        (4096, 2, 8),  # decoding
        (4096, 16, 16),
        (14336, 512, 128),  # a prompt
        (4096, 512, 128),
        (1024, 512, 64),  # 32 large tiles for 132 multiprocessors: smaller ones are sooner done
        (4096, 64, 32),
        (128_000, 512, 128),
    ],
)
def test_the_tile_on_a_device_of_132_multiprocessors(rows: int, tokens: int, tile: int) -> None:
    assert tile_tokens(rows, tokens, 132) == tile


def test_the_kernels_have_these_tiles() -> None:
    source = (files("vram_conductor.worker.pipeline.kernels") / "matmul.cu").read_text("utf-8")
    found = re.findall(r"MATMUL\(NAME, TYPE, (\d+), (\d+), ", source)
    assert {int(tokens): int(rows) for tokens, rows in found} == TILE_ROWS
    assert re.search(r"const int WARPS = 8;", source)


def test_kernels_are_made_for_the_wanted_types_only() -> None:
    kinds = {TensorType.Q6_K, TensorType.F16}
    compiled = nvrtc.compile_cubin(kernel_source("matvec.cu", "matmul.cu", kinds=kinds), "sm_90")
    wanted = {with_tile(tile, kind, 1, 1).kernel for tile in TILE_ROWS for kind in kinds}
    wanted |= {matvec_name(kind) for kind in kinds}
    assert set(compiled.usage) == {"to_half"} | wanted


def test_shared_memory_holds_two_stages() -> None:
    # 128 columns of 8 tokens for each of 8 warps, in f16, twice.
    assert with_tile(8, TensorType.F16, 100, 8).geometry.shared_bytes == 2 * 8 * 8 * 128 * 2
    assert with_tile(128, TensorType.F16, 100, 8).geometry.shared_bytes == 2 * 128 * 128 * 2
