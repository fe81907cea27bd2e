"""Timing an engine that takes batches of tokens, whoever's it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.forward import Batch

Step = Callable[[Batch], object]
"""Computes a batch. What it returns of the wanted tokens is its own business: logits (wanted,
n_vocab), or their best tokens."""

SEED = 20240607
WARM_UP = 2
STEPS_MIN = 2
ROUNDS = 3


def random_tokens(count: int, n_vocab: int, seed: int = SEED) -> NDArray[np.int32]:
    """Ids of any vocabulary; the first ones are often control tokens and left out."""
    first = min(1000, n_vocab // 2)
    return np.random.default_rng(seed).integers(first, n_vocab, count).astype(np.int32)


def decode_ms(
    step: Step, sequences: int, n_vocab: int, *, steps: int, seconds: float
) -> list[float]:
    """Decode ``sequences`` sequences side by side from their beginning, one token each per step.

    The tokens are drawn, not chosen: who chooses them is not what is measured. All logits are
    asked for, as whoever chooses would.

    Args:
        steps: measured, after a warm-up; fewer where they take more than ``seconds``, but
            :data:`STEPS_MIN` after at least one step.

    Returns:
        Milliseconds of each step.
    """
    every = np.arange(sequences, dtype=np.int32)
    took: list[float] = []
    began = time.monotonic()
    for at in range(WARM_UP + steps):
        tokens = random_tokens(sequences, n_vocab, SEED + at)
        batch = Batch.of(tokens, np.full(sequences, at), every, every)
        ms = step_ms(step, batch)
        over = time.monotonic() - began > seconds
        # Where steps are slow, what the first one alone pays for is little beside them.
        if at >= WARM_UP or (over and at):
            took.append(ms)
        if over and len(took) >= STEPS_MIN:
            break
    return took


def decode_in_turn(
    ways: Sequence[Step],
    sequences: int,
    n_vocab: int,
    *,
    steps: int,
    seconds: float,
    begin: Callable[[], object],
) -> list[list[float]]:
    """:func:`decode_ms` in several ways, in turn, :data:`ROUNDS` times: whatever the machine has
    still to get used to slows down a third of every way's steps, and none's median.

    Args:
        steps: of each way.
        seconds: for all together; each way is measured once in any case.
        begin: makes the sequences empty, and forgets what was before.

    Returns:
        Milliseconds of each step of each way.
    """
    took: list[list[float]] = [[] for _ in ways]
    began = time.monotonic()
    for at in range(ROUNDS):
        if at and time.monotonic() - began > seconds:
            break
        for step, found in zip(ways, took, strict=True):
            begin()
            share_s = seconds / (ROUNDS * len(ways))
            found += decode_ms(step, sequences, n_vocab, steps=-(-steps // ROUNDS), seconds=share_s)
    return took


def step_ms(step: Step, batch: Batch) -> float:
    """Milliseconds of one batch."""
    start = time.perf_counter()
    step(batch)
    return 1e3 * (time.perf_counter() - start)


def greedy(
    step: Callable[[Batch], NDArray[np.float32]], prompt: Sequence[int], count: int
) -> list[int]:
    """The most likely ``count`` tokens after ``prompt``, one after the other; ``step`` returns
    logits."""
    logits = step(Batch.of(np.asarray(prompt, np.int32), 0))
    found = [int(logits[0].argmax())]
    while len(found) < count:
        logits = step(Batch.of([found[-1]], len(prompt) + len(found) - 1))
        found.append(int(logits[0].argmax()))
    return found


@dataclass(frozen=True)
class Agreement:
    """How two engines' logits compare at the same positions.

    Cosines are of logits minus their mean over the vocabulary: softmax does not see that mean, and
    a large one would make anything look alike.

    Attributes:
        cosine: of all logits together.
        cosine_least, cosine_median: of one position's, over the positions.
        top1_share: of positions with the same most likely token (0 to 1).
        positions: that were compared.
        greedy_equal: tokens of the greedy continuation that are the same, from the first on.
        greedy_tokens: that were compared.
    """

    cosine: float
    cosine_least: float
    cosine_median: float
    top1_share: float
    positions: int
    greedy_equal: int
    greedy_tokens: int


def compare(
    ours: NDArray[np.float32],
    theirs: NDArray[np.float32],
    our_greedy: Sequence[int] = (),
    their_greedy: Sequence[int] = (),
) -> Agreement:
    """Compare logits (positions, n_vocab) and continuations."""
    a, b = _centred(ours), _centred(theirs)
    products, ours_norm, theirs_norm = (
        np.einsum("ij,ij->i", x, y, dtype=np.float64) for x, y in ((a, b), (a, a), (b, b))
    )
    cosines = _cosine(products, ours_norm, theirs_norm)
    # NumPy takes what is no number for the largest.
    same = (ours.argmax(axis=1) == theirs.argmax(axis=1)) & np.isfinite(ours).all(axis=1)
    pairs = list(zip(our_greedy, their_greedy, strict=True))
    equal = next((at for at, (x, y) in enumerate(pairs) if x != y), len(pairs))
    return Agreement(
        cosine=float(_cosine(products.sum(), ours_norm.sum(), theirs_norm.sum())),
        cosine_least=float(cosines.min()),
        cosine_median=float(np.median(cosines)),
        top1_share=float(same.mean()),
        positions=len(cosines),
        greedy_equal=equal,
        greedy_tokens=len(pairs),
    )


def _cosine(product: Any, ours_norm: Any, theirs_norm: Any) -> NDArray[np.float64]:
    """Where there is none (no numbers, or all the same), nothing agrees: 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: NDArray[np.float64] = product / np.sqrt(ours_norm * theirs_norm)
    return np.nan_to_num(found, nan=0.0)


def _centred(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = logits - logits.mean(axis=1, dtype=np.float64, keepdims=True)
    return found
