"""Token prompts for the benches: deterministic, of a given length, valid for any vocabulary."""

from __future__ import annotations

import random

SEED = 20240607


def token_ids(count: int, n_vocab: int, seed: int = SEED) -> list[int]:
    """``count`` ids away from the control tokens at both ends of usual vocabularies."""
    rng = random.Random(seed)
    return [rng.randrange(1000, min(n_vocab, 40_000)) for _ in range(count)]
