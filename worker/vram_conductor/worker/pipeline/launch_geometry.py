"""How many threads a kernel gets. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32

MATVEC_WARPS = 4
MATVEC_ROWS = 2
"""Of ``matvec.cu``: warps in a block; rows that a warp computes, as there."""


@dataclass(frozen=True)
class Geometry:
    """Of one launch: ``grid`` blocks of ``block`` threads, each with ``shared_bytes`` of dynamic
    shared memory."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0


def matvec(rows: int) -> Geometry:
    """``matvec_<type>`` for a matrix of that many rows."""
    return Geometry((-(-rows // (MATVEC_WARPS * MATVEC_ROWS)),), (MATVEC_WARPS * WARP,))
