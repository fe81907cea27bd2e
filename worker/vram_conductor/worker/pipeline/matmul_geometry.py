"""Which of ``kernels/matmul.cu`` computes a product, and with how many threads. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.worker.pipeline.launch_geometry import Geometry
from vram_conductor.worker.pipeline.tensor_types import TensorType

TILE_ROWS = {8: 16, 16: 32, 32: 32, 64: 64, 128: 128}
"""Tokens and rows of each kernel's tile, as there: one block computes it."""

_THREADS = 256
_HALF_THREADS = 512
_STEP_COLUMNS = 128
_UNPACKING_TOKENS = 46
"""Unpacking a weight takes as long as multiplying it with so many tokens (from the instructions of
the compiled kernels)."""


@dataclass(frozen=True)
class Matmul:
    """A launch of ``kernel`` with the arguments that matmul.cu names."""

    kernel: str
    geometry: Geometry


def to_half(tokens: int) -> Geometry:
    """``to_half``: what a product's activations go through first."""
    return Geometry((tokens,), (_HALF_THREADS,))


def tile_tokens(rows: int, tokens: int, multiprocessors: int) -> int:
    """The tile that keeps the device busy for the shortest time.

    A large one unpacks each weight for many tokens, but may leave multiprocessors without any. Time
    is counted in rounds of one block per multiprocessor, and goes with the products of a block and
    the weights that it unpacks.

    Returns:
        A key of :data:`TILE_ROWS`.
    """

    def time(tile: int) -> int:
        blocks = -(-tokens // tile) * -(-rows // TILE_ROWS[tile])
        return -(-blocks // multiprocessors) * TILE_ROWS[tile] * (_UNPACKING_TOKENS + tile)

    return min(TILE_ROWS, key=time)


def matmul(
    kind: TensorType, rows: int, tokens: int, *, multiprocessors: int, tensor_cores: bool
) -> Matmul:
    """The product of a matrix of ``rows`` rows with ``tokens`` tokens.

    Args:
        multiprocessors: of the device.
        tensor_cores: whether its compute capability is 8.0 at least.
    """
    return with_tile(tile_tokens(rows, tokens, multiprocessors), kind, rows, tokens, tensor_cores)


def with_tile(
    tile: int, kind: TensorType, rows: int, tokens: int, tensor_cores: bool = True
) -> Matmul:
    """:func:`matmul` with a given key of :data:`TILE_ROWS`."""
    grid = -(-tokens // tile), -(-rows // TILE_ROWS[tile])
    # Two stages of the f16 activations of 8 warps' steps, a step for each 16 of the tile's rows.
    shares = _THREADS // 32 * 16 // TILE_ROWS[tile]
    shared_bytes = 2 * shares * tile * _STEP_COLUMNS * 2 if tensor_cores else 0
    return Matmul(f"matmul_{kind.name.lower()}_{tile}", Geometry(grid, (_THREADS,), shared_bytes))
