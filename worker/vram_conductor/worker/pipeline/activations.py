"""What a forward pass on a GPU needs besides weights and KV cache: named arrays in one block of
device memory. *Pure.*

Nothing is allocated while a model computes: the sizes follow from the model's dimensions and the
engine's limits alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.forward import Capacity
from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters

ALIGNMENT = 256
_FLOAT, _INT, _HALF = 4, 4, 2


@dataclass(frozen=True)
class Activations:
    """Where each array begins in the block.

    Attributes:
        offsets: name → bytes from the beginning, multiples of ALIGNMENT.
        n_bytes: of the block.
    """

    offsets: Mapping[str, int]
    n_bytes: int


def activations(it: Hyperparameters, capacity: Capacity, scratch_bytes: int) -> Activations:
    """The block of one engine. n is ``tokens_max``, or ``wanted_max`` where that is more (a token
    may be wanted twice):

    - ``x`` (n, n_embd): the residual stream; ``h`` (n, n_embd): its norm, or what is normalised
      before it is added; ``q`` (n, q_width), ``k`` and ``v`` (n, kv_width); ``mixed``
      (n, q_width): what attention gives; ``gate`` and ``up`` (n, n_ff);
    - ``half`` (n, the widest of them) and ``scale`` (n,): f16 factors of a matrix product;
    - ``position`` and ``sequence`` (n,): int32;
    - ``logits`` of at most ``wanted_max`` tokens, one chunk of the head after the other, each
      (wanted, rows); ``best`` and ``best_token`` (wanted,): the largest so far, and its id;
    - ``frequency_0``, ``frequency_1``: of the rotations, for layers that see everything and for
      windowed ones;
    - ``scratch``: of the attention's kernels.

    Args:
        scratch_bytes: of the attention plan.
    """
    tokens = max(capacity.tokens_max, capacity.wanted_max)
    sizes = {
        "x": tokens * it.n_embd * _FLOAT,
        "h": tokens * it.n_embd * _FLOAT,
        "q": tokens * it.q_width * _FLOAT,
        "k": tokens * it.kv_width * _FLOAT,
        "v": tokens * it.kv_width * _FLOAT,
        "mixed": tokens * it.q_width * _FLOAT,
        "gate": tokens * it.n_ff * _FLOAT,
        "up": tokens * it.n_ff * _FLOAT,
        "half": tokens * max(it.n_embd, it.q_width, it.n_ff) * _HALF,
        "scale": tokens * _FLOAT,
        "position": tokens * _INT,
        "sequence": tokens * _INT,
        "logits": capacity.wanted_max * it.n_vocab * _FLOAT,
        "best": capacity.wanted_max * _FLOAT,
        "best_token": capacity.wanted_max * _INT,
        "scratch": scratch_bytes,
    }
    for which, turn in enumerate(it.ropes):
        sizes[f"frequency_{which}"] = turn.inverse_frequencies.nbytes
    offsets: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return Activations(offsets, end)


def runs(wanted: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Rows that follow each other: (first row, place of it in ``wanted``, how many)."""
    breaks = np.flatnonzero(np.diff(wanted) != 1) + 1
    places = [0, *breaks.tolist(), len(wanted)] if len(wanted) else [0]
    return [(int(wanted[start]), start, end - start) for start, end in pairwise(places)]
