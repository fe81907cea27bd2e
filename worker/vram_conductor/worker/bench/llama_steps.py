"""llama.cpp as something that takes batches of tokens, where it can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.bench.decoding import Step
from vram_conductor.worker.pipeline.forward import Batch

Logits = NDArray[np.float32]
"""(positions, n_vocab)."""


def load_bare() -> Any:
    """The module that imports llama_cpp.

    Raises:
        FailedPrecondition: ``no_library``.
    """
    try:
        from vram_conductor.worker.llama import bare
    except (ImportError, OSError, RuntimeError) as error:
        raise FailedPrecondition(
            "no_library", f"llama.cpp cannot be loaded ({error}); nothing to compare with"
        ) from error
    return bare


def stepper(context: Any) -> Callable[[Batch], Logits]:
    compute = computer(context)

    def step(batch: Batch) -> Logits:
        compute(batch)
        logits: Logits = context.logits(batch.wanted.tolist())
        return logits

    return step


def computer(context: Any) -> Step:
    """Without a copy of the logits that llama.cpp has put into main memory."""
    return lambda batch: context.decode(
        batch.tokens.tolist(),
        batch.positions.tolist(),
        batch.sequences.tolist(),
        batch.wanted.tolist(),
    )
