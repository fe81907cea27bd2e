"""What a tensor is: a type, rows and columns. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class TensorType(IntEnum):
    """Types that have kernels; the numbers are ggml's (``enum ggml_type`` in ggml.h).

    A row is a sequence of blocks: ``block_values`` values in ``block_bytes`` bytes. What a block
    looks like is said where it is taken apart (``dequantise``, ``kernels/formats.cu``).
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q8_0 = 8
    Q4_K = 12
    Q6_K = 14

    @property
    def block_values(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row; ``columns`` is a multiple of ``block_values``."""
        return columns // self.block_values * self.block_bytes


_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q4_0: (32, 2 + 16),
    TensorType.Q4_1: (32, 2 + 2 + 16),
    TensorType.Q5_0: (32, 2 + 4 + 16),
    TensorType.Q8_0: (32, 2 + 32),
    TensorType.Q4_K: (256, 2 + 2 + 12 + 128),
    TensorType.Q6_K: (256, 128 + 64 + 16 + 2),
}


@dataclass(frozen=True)
class Tensor:
    """A matrix, or a vector as a matrix of one row.

    Attributes:
        name: as in the file.
        columns: values in a row, contiguous: what a layer reads. ggml's first dimension.
        offset: of its first byte in the file.
    """

    name: str
    type: TensorType
    rows: int
    columns: int
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.columns)

    @property
    def n_bytes(self) -> int:
        return self.rows * self.row_bytes
