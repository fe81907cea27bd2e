"""Rotary position embeddings as a file describes them. *Pure.*

A pair of values at position p turns by p × inverse_frequency; cosine and sine are multiplied by a
magnitude. Sources: RoFormer (https://arxiv.org/abs/2104.09864); YaRN
(https://arxiv.org/abs/2309.00071), section 3; the metadata keys are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, their defaults llama.cpp's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scaling = Literal["none", "linear", "yarn"]
SCALINGS: tuple[Scaling, ...] = ("none", "linear", "yarn")

YARN_BETA_FAST = 32.0
"""Pairs that turn more often than this in the original context stay as they are."""

YARN_BETA_SLOW = 1.0
"""Pairs that turn less often are stretched like linear ones."""


@dataclass(frozen=True)
class Rope:
    """What one layer turns its queries and keys by.

    Attributes:
        inverse_frequencies: radians per position, of each pair of values (n_rot / 2,).
        magnitude: factor of cosine and sine.
    """

    inverse_frequencies: NDArray[np.float32]
    magnitude: float = 1.0

    @property
    def n_rot(self) -> int:
        """Values of a head that are turned, from its first one on."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies are changed for contexts longer than those of the training.

    Attributes:
        factor: so many times longer; 1 changes nothing.
        original_context: of the training, in tokens (yarn).
        attention_factor: of the magnitude, whatever the kind.
    """

    kind: Scaling = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0


def rope_of(
    n_rot: int,
    base: float,
    scaling: RopeScaling,
    divisors: NDArray[np.float32] | None = None,
) -> Rope:
    """The rotation of heads of which ``n_rot`` values turn.

    ``divisors`` (n_rot / 2,) divide the frequencies one by one: the tensor ``rope_freqs.weight``,
    which holds Llama 3's scaling.
    """
    pairs = np.arange(n_rot // 2, dtype=np.float64)
    frequencies = float(base) ** (-2.0 * pairs / n_rot)
    if divisors is not None:
        frequencies = frequencies / divisors.astype(np.float64)
    magnitude = scaling.attention_factor
    if scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling.kind == "yarn":
        kept = _kept_share(pairs, n_rot, base, scaling)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        if scaling.factor > 1:
            magnitude *= 1 + 0.1 * math.log(scaling.factor)
    # What is no finite number is for the caller to refuse.
    with np.errstate(over="ignore"):
        return Rope(frequencies.astype(np.float32), magnitude)


def _kept_share(
    pairs: NDArray[np.float64], n_rot: int, base: float, scaling: RopeScaling
) -> NDArray[np.float64]:
    """1 for pairs that keep their frequency, 0 for those that are stretched, a ramp between."""

    def pair_that_turns(times: float) -> float:
        """So many times within the original context; not a whole number."""
        return (
            n_rot
            * math.log(scaling.original_context / (times * 2 * math.pi))
            / (2 * math.log(base))
        )

    low = max(0, math.floor(pair_that_turns(YARN_BETA_FAST)))
    high = min(n_rot - 1, math.ceil(pair_that_turns(YARN_BETA_SLOW)))
    return 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
