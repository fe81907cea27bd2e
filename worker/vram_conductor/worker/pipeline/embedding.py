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

    Raises:
        DataLoss: as ``GgufTensors.read``.
    """
    table = model.embedding
    rows = np.empty((len(tokens), table.row_bytes), np.uint8)
    for row, token in zip(rows, tokens.tolist(), strict=True):
        model.gguf.read(table.name, token * table.row_bytes, row)
    x = dequantise(rows, table.type, len(tokens), table.columns)
    x *= np.float32(model.hyperparameters.embedding_scale)
    return x
