"""Batches, and what may follow what: the book of a KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import ConductorError, InvalidArgument, OutOfRange
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.kv_cache import KvCache, kv_bytes

CAPACITY = Capacity(n_ctx=16, sequences=3, tokens_max=8, wanted_max=2)
N_VOCAB = 100


def cache(*lengths: int) -> KvCache:
    made = KvCache(CAPACITY, N_VOCAB)
    made.lengths[:] = lengths or (0, 0, 0)
    return made


def test_a_batch_from_plain_numbers() -> None:
    batch = Batch.of([7, 8, 9], 4, 2)
    assert (batch.tokens.tolist(), batch.positions.tolist()) == ([7, 8, 9], [4, 5, 6])
    assert (batch.sequences.tolist(), batch.wanted.tolist(), len(batch)) == ([2, 2, 2], [2], 3)
    ragged = Batch.of([7, 8], [3, 0], [1, 0], wanted=[])
    assert (ragged.positions.tolist(), ragged.sequences.tolist()) == ([3, 0], [1, 0])
    assert ragged.wanted.tolist() == []
    for array in vars(batch).values():
        assert array.dtype == np.int32


@pytest.mark.parametrize(
    ("arguments", "reason", "details"),
    [
        (([], 0), "empty_batch", {"tokens": 0}),
        (([1.5], 0), "bad_batch", {"name": "tokens"}),
        (([[1, 2]], 0), "bad_batch", {"name": "tokens"}),
        (([1], [2**31]), "bad_batch", {"name": "positions", "most": 2**31}),
        (([1, 2], [0]), "bad_batch", {"tokens": 2, "positions": 1}),
        (([1, 2], 0, [0, 0, 0]), "bad_batch", {"tokens": 2, "sequences": 3}),
        (([1], 0, 0, ["last"]), "bad_batch", {"name": "wanted"}),
        (([True], 0), "bad_batch", {"name": "tokens"}),
        (([[1, 2], [3]], 0), "bad_batch", {"name": "tokens"}),
        (([1, 2], 2**31 - 1), "bad_batch", {"name": "positions", "most": 2**31}),
    ],
)
def test_what_is_no_batch(arguments: Any, reason: str, details: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Batch.of(*arguments)
    assert refused.value.reason == reason
    assert refused.value.details.items() >= details.items()


@pytest.mark.parametrize("name", ["n_ctx", "sequences", "tokens_max", "wanted_max"])
def test_a_capacity_of_nothing(name: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Capacity(**({"n_ctx": 1} | {name: 0}))
    assert (refused.value.reason, refused.value.details) == (
        "bad_capacity",
        {"name": name, "value": 0},
    )


@pytest.mark.parametrize(
    ("batch", "kind", "reason", "details"),
    [
        (
            Batch.of([1] * 9, 0),
            InvalidArgument,
            "batch_too_large",
            {"tokens": 9, "tokens_max": 8},
        ),
        (
            Batch.of([1] * 3, 0, wanted=[0, 1, 2]),
            InvalidArgument,
            "too_many_wanted",
            {"wanted": 3, "wanted_max": 2},
        ),
        (
            Batch.of([1, 100], 0),
            InvalidArgument,
            "token_out_of_range",
            {"value": 100, "end": 100},
        ),
        (Batch.of([-1], 0), InvalidArgument, "token_out_of_range", {"value": -1}),
        (Batch.of([1], 0, 3), InvalidArgument, "sequence_out_of_range", {"value": 3, "end": 3}),
        (
            Batch.of([1], 0, wanted=[1]),
            InvalidArgument,
            "wanted_out_of_range",
            {"value": 1, "end": 1},
        ),
        (Batch.of([1], 16, 2), OutOfRange, "context_full", {"position": 16, "n_ctx": 16}),
        (Batch.of([1], 6), InvalidArgument, "position_gap", {"held": 5, "first": 6}),
        (Batch.of([1], -1), InvalidArgument, "position_gap", {"first": -1}),
        (Batch.of([1, 2], [5, 5]), InvalidArgument, "position_gap", {"first": 5, "last": 5}),
        (Batch.of([1, 2], [5, 7]), InvalidArgument, "position_gap", {"last": 7, "tokens": 2}),
    ],
)
def test_what_may_not_follow(
    batch: Batch, kind: type[ConductorError], reason: str, details: dict[str, int]
) -> None:
    book = cache(5, 0, 16)
    with pytest.raises(kind) as refused:
        book.check(batch)
    assert refused.value.reason == reason
    assert refused.value.details.items() >= details.items()
    assert book.lengths.tolist() == [5, 0, 16]


def test_sequences_go_on_side_by_side_in_any_order() -> None:
    book = cache(5, 0, 15)
    batch = Batch.of([1, 2, 3, 4, 5], [6, 0, 15, 5, 1], [0, 1, 2, 0, 1])
    book.check(batch)
    book.forget(batch)
    assert book.lengths.tolist() == [5, 0, 15]
    book.keep(batch)
    assert book.lengths.tolist() == [7, 2, 16]
    book.reset()
    assert book.lengths.tolist() == [0, 0, 0]


def test_going_back_drops_what_follows_even_if_it_fails() -> None:
    book = cache(9, 4, 0)
    batch = Batch.of([1, 2], 3, 0)
    book.check(batch)
    book.forget(batch)
    assert book.lengths.tolist() == [3, 4, 0]
    book.keep(batch)
    assert book.lengths.tolist() == [5, 4, 0]


def test_bytes() -> None:
    """Keys and values of 5 layers, 3 sequences of 16 positions, 24 numbers of two bytes."""
    assert kv_bytes(CAPACITY, 5, 24) == 2 * 5 * 3 * 16 * 24 * 2


@given(st.data())
def test_a_sequence_is_what_a_list_would_be(data: st.DataObject) -> None:
    """Whatever batches come: those that a list of tokens per sequence allows are allowed."""
    book = KvCache(CAPACITY, N_VOCAB)
    held: list[int] = [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 8))
        sequences = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        starts = [data.draw(st.integers(0, 16)) for _ in range(3)]
        seen = [0, 0, 0]
        positions: list[int] = []
        for sequence in sequences:
            positions.append(starts[sequence] + seen[sequence])
            seen[sequence] += 1
        batch = Batch.of([1] * count, positions, sequences)
        used = [s for s in range(3) if seen[s]]
        fine = all(starts[s] <= held[s] and starts[s] + seen[s] <= 16 for s in used)
        try:
            book.check(batch)
        except ConductorError:
            assert not fine
            continue
        assert fine
        book.forget(batch)
        book.keep(batch)
        for s in used:
            held[s] = starts[s] + seen[s]
        assert book.lengths.tolist() == held
