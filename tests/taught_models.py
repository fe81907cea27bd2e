"""Tiny random models whose output head was taught to say a given reply, with a known margin.

Of 320 random logits, the best two are often nearer to each other than rounding moves them: which
one is greedy then says nothing. Here the head's rows are changed, as little as needed, until at
each step of a random reply the next token is ahead of every other by a margin. What the head gets
is asked of llama.cpp, with the weights written as F32. Everything below the head stays random, and
a token depends on all of it: one layer drawn anew, and the reply is another one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from llama_oracle import LlamaOracle
from numpy.typing import NDArray
from quantised_models import Quantised, make_quantised

from vram_conductor.worker.pipeline.forward import Batch, Capacity

REPLY_TOKENS = 40
PROMPT_TOKENS = 12
MARGIN = 3.0
"""In logits, whose standard deviation is 6."""

_ROUNDS_MAX = 2000


@dataclass(frozen=True)
class Taught:
    """A model and what it says: ``reply`` after ``prompt``, greedily."""

    path: Path
    prompt: list[int]
    reply: list[int]


def make_taught(spec: Quantised, folder: Path | None = None) -> Taught:
    """Write the model, once."""
    rng = np.random.default_rng([spec.seed, 99])
    ids = rng.permutation(spec.n_vocab)[: PROMPT_TOKENS + REPLY_TOKENS].tolist()
    prompt, reply = ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:]
    capacity = Capacity(n_ctx=256, tokens_max=len(ids))
    exact = make_quantised(replace(spec, as_f32=True, corrupt=None), folder)
    with LlamaOracle(exact, capacity) as oracle:
        steps = range(PROMPT_TOKENS - 1, len(ids) - 1)
        states = oracle.states(Batch.of(ids[:-1], 0, wanted=list(steps)))
    head = rng.normal(0, 6 / np.sqrt(spec.n_embd), (spec.n_vocab, spec.n_embd))
    return Taught(make_quantised(spec, folder, _teach(head, states, reply)), prompt, reply)


def _teach(
    head: NDArray[np.float64], states: NDArray[np.float32], reply: list[int]
) -> NDArray[np.float32]:
    """A perceptron with a margin (https://doi.org/10.1037/h0042519): where a token is not ahead
    enough, half of what is missing goes into its row, the other half out of its rival's."""
    exact = states.astype(np.float64)
    for _ in range(_ROUNDS_MAX):
        changed = False
        for state, token in zip(exact, reply, strict=True):
            logits = head @ state
            logits[token] -= MARGIN
            rival = int(logits.argmax())
            if rival != token:
                missing = logits[rival] - logits[token]
                change = 0.55 * missing * state / (state @ state)
                head[token] += change
                head[rival] -= change
                changed = True
        if not changed:
            return head.astype(np.float32)
    raise AssertionError(f"not taught after {_ROUNDS_MAX} rounds")
