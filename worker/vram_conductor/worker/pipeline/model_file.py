"""A GGUF that the layer pipeline can compute: checked, laid out in units, nothing allocated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.gguf_tensors import GgufTensors
from vram_conductor.worker.pipeline.hyperparameters import Hyperparameters, read_hyperparameters
from vram_conductor.worker.pipeline.layout import Unit, fill, units_of
from vram_conductor.worker.pipeline.metadata import Metadata
from vram_conductor.worker.pipeline.tensor_list import ROPE_FREQS, check_tensors
from vram_conductor.worker.pipeline.tensor_types import Tensor, TensorType


class ModelFile:
    """One open model.

    Attributes:
        gguf: the file's tensors.
        hyperparameters: of the forward pass.
        units: of one pass, in order: layers, then chunks of the output head.
    """

    def __init__(self, gguf: GgufTensors, found: Hyperparameters) -> None:
        self.gguf = gguf
        self.hyperparameters = found
        self.units: list[Unit] = units_of(found, gguf.tensors)

    @classmethod
    def open(cls, path: str | Path) -> ModelFile:
        """Open and check a file; everything that cannot be computed is found here.

        Raises:
            NotFound: ``no_such_model``.
            InvalidArgument: ``bad_model``, ``split_model``.
            Unimplemented: ``unsupported_architecture``, ``unsupported_tensor``,
                ``unsupported_feature``.
            DataLoss: ``truncated_model``.
        """
        gguf = GgufTensors.open(path)
        try:
            metadata = Metadata(str(path), gguf.metadata)
            found = read_hyperparameters(metadata, gguf.tensors, _rope_divisors(gguf))
            check_tensors(str(path), found, gguf.tensors)
            return cls(gguf, found)
        except BaseException:
            gguf.close()
            raise

    @property
    def embedding(self) -> Tensor:
        """The token embedding: (n_vocab, n_embd)."""
        return self.gguf.tensors["token_embd.weight"]

    @property
    def largest_bytes(self) -> int:
        """Of the largest unit: the size of a slot."""
        return max(unit.n_bytes for unit in self.units)

    def fill(self, unit: Unit, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Write the unit's bytes into ``out`` (at least unit.n_bytes,); returns that part.

        Raises:
            DataLoss: as ``GgufTensors.read``.
        """
        return fill(unit, self.gguf.read, out)

    def close(self) -> None:
        """More than once is fine."""
        self.gguf.close()

    def __enter__(self) -> ModelFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _rope_divisors(gguf: GgufTensors) -> NDArray[np.float32] | None:
    freqs = gguf.tensors.get(ROPE_FREQS)
    if freqs is None or freqs.type != TensorType.F32:
        # Of another type it is refused like any other vector.
        return None
    return gguf.data(ROPE_FREQS).view("<f4")
