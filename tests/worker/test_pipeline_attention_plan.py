"""Every token of a batch is computed once, by the kernel that suits it, in the scratch there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.attention_plan import (
    RUN_TOKENS,
    SPLIT_BLOCKS,
    SPLIT_POSITIONS,
    TILE_BLOCKS,
    AttentionMemory,
    Heads,
    Part,
    launches,
    plan,
    scratch_bytes,
)

EIGHT_B = Heads(32, 8, 128)
H200 = 132

Indices = NDArray[np.int32]

heads_of = st.builds(
    lambda group, n_head_kv, dim: Heads(group * n_head_kv, n_head_kv, dim),
    st.integers(1, 9),
    st.integers(1, 12),
    st.sampled_from([32, 64, 80, 96, 128, 256]),
)
run_of = st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 30_000))


def batch(*runs: tuple[int, int, int]) -> tuple[Indices, Indices]:
    """Positions and sequences of runs of (sequence, tokens, first position)."""
    places = [(first + i, sequence) for sequence, tokens, first in runs for i in range(tokens)]
    positions, sequences = np.array(places, np.int32).T
    return positions, sequences


@given(
    st.lists(run_of, min_size=1, max_size=8),
    heads_of,
    st.sampled_from([0, 1, 512, 4096]),
    st.integers(1, 200),
)
def test_any_batch(
    runs: list[tuple[int, int, int]], heads: Heads, window: int, multiprocessors: int
) -> None:
    positions, sequences = batch(*runs)
    parts = plan(positions, sequences, heads, window, multiprocessors)
    covered = [token for part in parts for token in range(part.first, part.first + part.tokens)]
    assert covered == list(range(len(positions)))
    memory = AttentionMemory(1, 2, 3, 4, 5, 6, 7)
    grids = [
        launch.geometry.grid
        for launch in launches(parts, heads, memory, 32768, 1.0, window)
        if launch.kernel != "attention_combine"
    ]
    for part, grid in zip(parts, grids, strict=True):
        mine = slice(part.first, part.first + part.tokens)
        borders = np.flatnonzero(np.diff(sequences[mine])) + 1
        lengths = np.diff(np.array([0, *borders, part.tokens]))
        is_tile = part.kernel == "attention_tile"
        # A run may go on in the part before or behind, which then is of the other kernel: never.
        assert ((lengths >= RUN_TOKENS) == is_tile).all()
        if part.splits == 1:
            continue
        limit = (TILE_BLOCKS if is_tile else SPLIT_BLOCKS) * multiprocessors
        assert np.prod(grid) <= limit
        seen = int(positions[mine].max()) + 1
        assert part.splits * SPLIT_POSITIONS <= (min(seen, window) if window else seen)
        need = part.tokens * heads.n_head * part.splits * (heads.head_dim + 2) * 4
        assert need <= scratch_bytes(heads, len(positions), multiprocessors)


@pytest.mark.parametrize(
    ("runs", "parts"),
    [
        # A prompt keeps the device busy by itself, and so do 256 sequences of one token each.
        ([(0, 512, 0)], [Part("attention_tile", 0, 512, 1)]),
        ([(i, 1, 255) for i in range(256)], [Part("attention_split", 0, 256, 1)]),
        # One token does not, once its context is long.
        ([(0, 1, 8191)], [Part("attention_split", 0, 1, 32)]),
        ([(0, 1, 300)], [Part("attention_split", 0, 1, 1)]),
        ([(0, 16, 8000)], [Part("attention_tile", 0, 16, 31)]),
        # Decoding beside prompts.
        (
            [(0, 1, 700), (1, 1, 40), (2, 100, 0), (3, 60, 9), (4, 1, 5)],
            [
                Part("attention_split", 0, 2, 2),
                Part("attention_tile", 2, 160, 1),
                Part("attention_split", 162, 1, 1),
            ],
        ),
    ],
)
def test_plans_for_an_8b_model(runs: list[tuple[int, int, int]], parts: list[Part]) -> None:
    assert plan(*batch(*runs), EIGHT_B, 0, H200) == parts


def test_a_window_limits_the_splits() -> None:
    positions, sequences = batch((0, 1, 8191))
    assert plan(positions, sequences, EIGHT_B, 1024, H200)[0].splits == 4


def test_split_positions_are_combined() -> None:
    parts = [Part("attention_split", 3, 2, 4), Part("attention_tile", 5, 20, 1)]
    memory = AttentionMemory(10, 20, 30, 40, 50, 60, 70)
    split, combine, tile = launches(parts, EIGHT_B, memory, 8192, 0.5, 0)
    assert (split.kernel, split.geometry.grid) == ("attention_split", (2, 8, 4))
    assert (combine.kernel, combine.geometry.grid) == ("attention_combine", (2 * 32,))
    assert list(combine.arguments) == [50, 40, 3, 32, 4]
    assert (tile.kernel, tile.geometry.grid) == ("attention_tile", (2, 8, 1))
    assert tile.arguments[4] == 0, "without splits, results go straight to their place"


def test_scratch_for_an_8b_model() -> None:
    assert scratch_bytes(EIGHT_B, 512, H200) == 2 * 132 * 64 * 130 * 4
    assert scratch_bytes(EIGHT_B, 1, H200) == 4 * 132 * 4 * 130 * 4
