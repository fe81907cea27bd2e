"""The token embedding: looked up on the host, row by row, and never transferred as a whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.dequantise import dequantise
from vram_conductor.worker.pipeline.model_file import ModelFile


def embed(model: ModelFile, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """The residual stream before the first layer, (tokens, n_embd).

    Args:
        tokens: ids within the vocabulary (n,).
    """
    table = model.embedding
    rows = model.gguf.data(table.name).reshape(table.rows, table.row_bytes)[tokens]
    x = dequantise(rows, table.type, len(tokens), table.columns)
    x *= np.float32(model.hyperparameters.embedding_scale)
    return x
