"""How an engine that decodes is timed, and logits are compared."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vram_conductor.worker.bench.decoding import (
    ROUNDS,
    STEPS_MIN,
    WARM_UP,
    Step,
    compare,
    decode_in_turn,
    decode_ms,
    greedy,
    random_tokens,
)
from vram_conductor.worker.pipeline.forward import Batch

N_VOCAB = 50


class Echo:
    """An engine whose most likely next token is the token plus one; keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def step(self, batch: Batch) -> NDArray[np.float32]:
        self.batches.append(batch)
        return np.eye(N_VOCAB, dtype=np.float32)[(batch.tokens[batch.wanted] + 1) % N_VOCAB]


def test_sequences_decode_side_by_side_from_their_beginning() -> None:
    echo = Echo()
    took = decode_ms(echo.step, 3, N_VOCAB, steps=4, seconds=60)
    assert len(took) == 4
    assert len(echo.batches) == WARM_UP + 4
    for at, batch in enumerate(echo.batches):
        assert batch.positions.tolist() == [at] * 3
        assert batch.sequences.tolist() == [0, 1, 2]
        assert batch.wanted.tolist() == [0, 1, 2]
    assert any((batch.tokens != echo.batches[0].tokens).any() for batch in echo.batches)


def test_a_slow_engine_is_measured_a_little_all_the_same() -> None:
    echo = Echo()
    assert len(decode_ms(echo.step, 1, N_VOCAB, steps=16, seconds=0)) == STEPS_MIN
    ways = decode_in_turn([echo.step] * 2, 1, N_VOCAB, steps=16, seconds=0, begin=lambda: None)
    assert [len(took) for took in ways] == [STEPS_MIN] * 2


def test_ways_are_measured_in_turn() -> None:
    """What comes first in a process is slower: it must not be one way's alone."""
    said: list[str] = []

    def way(name: str) -> Step:
        return lambda batch: said.append(f"{name}{batch.positions[0]}")

    took = decode_in_turn(
        [way("a"), way("b")], 1, N_VOCAB, steps=6, seconds=60, begin=lambda: said.append("begin")
    )
    assert [len(it) for it in took] == [6, 6]
    steps = range(WARM_UP + 6 // ROUNDS)
    once = [["begin", *(f"{name}{at}" for at in steps)] for name in "ab"]
    assert said == ROUNDS * (once[0] + once[1])


def test_greedy_goes_on_where_the_prompt_ends() -> None:
    echo = Echo()
    assert greedy(echo.step, [7, 8, 9], 4) == [10, 11, 12, 13]
    assert [batch.positions.tolist() for batch in echo.batches] == [[0, 1, 2], [3], [4], [5]]


def test_drawn_tokens_are_in_the_vocabulary_and_the_same_each_time() -> None:
    for n_vocab in (2, 50, 128_256):
        tokens = random_tokens(1000, n_vocab)
        assert tokens.min() >= 0
        assert tokens.max() < n_vocab
        assert np.array_equal(tokens, random_tokens(1000, n_vocab))


def test_logits_are_compared_position_by_position() -> None:
    rng = np.random.default_rng(1)
    ours = rng.normal(size=(4, 9)).astype(np.float32)
    same = compare(ours, ours.copy(), [1, 2, 3], [1, 2, 3])
    assert same.cosine_least == pytest.approx(1)
    assert same.cosine == pytest.approx(1)
    assert (same.top1_share, same.positions) == (1.0, 4)
    assert (same.greedy_equal, same.greedy_tokens) == (3, 3)
    theirs = ours.copy()
    theirs[2] = -theirs[2]
    shifted = compare(ours + 1e3, ours[::-1] + 1e3)
    assert shifted.cosine < 0.9, "what all logits have in common says nothing"
    other = compare(ours, theirs, [1, 2, 3, 4], [1, 2, 9, 4])
    assert other.cosine_least == pytest.approx(-1)
    assert other.cosine_median == pytest.approx(1)
    assert -1 < other.cosine < 1
    assert other.top1_share == 0.75
    assert other.greedy_equal == 2


def test_what_is_no_number_agrees_with_nothing() -> None:
    """Not even with itself; the other positions still count."""
    theirs = np.random.default_rng(3).normal(0, 1, (4, 50)).astype(np.float32)
    ours = theirs.copy()
    ours[1, 7] = np.nan
    ours[2] = np.inf
    ours[3] = 0
    found = compare(ours, theirs)
    assert (found.cosine, found.cosine_least, found.top1_share) == (0, 0, 0.25)
    assert compare(ours, ours).cosine_least == 0
    assert compare(ours[:1], theirs[:1]).cosine_least > 0.999999
