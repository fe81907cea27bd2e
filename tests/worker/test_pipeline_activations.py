"""The account of a forward pass's memory on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vram_conductor.worker.pipeline.activations import ALIGNMENT, activations, runs
from vram_conductor.worker.pipeline.forward import Capacity
from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters
from vram_conductor.worker.pipeline.rope import Rope

ROPE = Rope(np.ones(32, np.float32))
SHAPES = st.builds(
    Hyperparameters,
    arch=st.just("llama"),
    n_layer=st.integers(1, 80),
    n_embd=st.integers(1, 256).map(lambda n: 32 * n),
    n_head=st.integers(1, 64),
    n_head_kv=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 128, 256]),
    n_ff=st.integers(1, 512).map(lambda n: 32 * n),
    n_vocab=st.integers(1, 300_000),
    n_ctx_train=st.just(4096),
    norm_eps=st.just(1e-5),
    rope_pairs=st.just("halves"),
    attention_scale=st.just(0.1),
    ropes=st.just((ROPE, ROPE)),
)
CAPACITIES = st.builds(
    Capacity,
    n_ctx=st.integers(1, 100_000),
    sequences=st.integers(1, 256),
    tokens_max=st.integers(1, 1024),
    wanted_max=st.integers(1, 256),
)


@settings(deadline=None)
@given(SHAPES, CAPACITIES, st.integers(0, 1 << 30))
def test_every_array_has_its_room(
    it: Hyperparameters, capacity: Capacity, scratch_bytes: int
) -> None:
    block = activations(it, capacity, scratch_bytes)
    n, wanted = capacity.tokens_max, capacity.wanted_max
    least = {
        "x": 4 * n * it.n_embd,
        "h": 4 * max(n, wanted) * it.n_embd,
        "q": 4 * n * it.q_width,
        "k": 4 * n * it.kv_width,
        "v": 4 * n * it.kv_width,
        "mixed": 4 * n * it.q_width,
        "gate": 4 * n * it.n_ff,
        "up": 4 * n * it.n_ff,
        "half": 2 * max(n * it.n_ff, n * it.q_width, max(n, wanted) * it.n_embd),
        "scale": 4 * max(n, wanted),
        "position": 4 * n,
        "sequence": 4 * n,
        "logits": 4 * wanted * it.n_vocab,
        "best": 4 * wanted,
        "best_token": 4 * wanted,
        "scratch": scratch_bytes,
        "frequency_0": 4 * 32,
        "frequency_1": 4 * 32,
    }
    assert set(block.offsets) == set(least)
    by_place = sorted(block.offsets.items(), key=lambda item: item[1])
    ends = [offset for _, offset in by_place[1:]] + [block.n_bytes]
    for (name, offset), end in zip(by_place, ends, strict=True):
        assert offset % ALIGNMENT == 0
        assert end - offset >= least[name], name


@given(SHAPES, CAPACITIES)
def test_depth_and_context_cost_nothing(it: Hyperparameters, capacity: Capacity) -> None:
    deeper = replace(it, n_layer=2 * it.n_layer)
    longer = replace(capacity, n_ctx=2 * capacity.n_ctx)
    assert activations(deeper, longer, 0).n_bytes == activations(it, capacity, 0).n_bytes


@given(st.lists(st.integers(0, 40), max_size=30))
def test_runs_are_the_rows_in_order(rows: list[int]) -> None:
    found = runs(np.array(rows, np.int32))
    taken = [first + i for first, _, count in found for i in range(count)]
    assert taken == rows
    assert [place for _, place, _ in found] == np.cumsum(
        [0, *(count for _, _, count in found)]
    ).tolist()[:-1]
    assert all(count > 0 for _, _, count in found)
    for (first, _, count), (after, _, _) in pairwise(found):
        assert after != first + count, "one run was cut in two"
