"""How many threads a kernel gets. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32

MATVEC_WARPS = 4
MATVEC_ROWS = 2
"""Of ``matvec.cu``: warps in a block; rows that a warp computes, as there."""

ARGMAX_THREADS = 256

VALUES_BLOCK = 256
"""Threads of a block where each thread has one value, or one pair."""

BLOCK_MAX = 1024
"""Threads of any block."""


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


def rms_norm(rows: int, width: int) -> Geometry:
    """One block per row; a thread for each four values, as far as a block goes."""
    warps = -(-width // (4 * WARP))
    return Geometry((rows,), (min(BLOCK_MAX, warps * WARP),))


def argmax(tokens: int) -> Geometry:
    """One block per token."""
    return Geometry((tokens,), (ARGMAX_THREADS,))


def rope(tokens: int, heads: int, n_rot: int) -> Geometry:
    """``rope`` for the queries (heads: n_head) or the keys (n_head_kv)."""
    return values(tokens * heads * (n_rot // 2))


def values(count: int) -> Geometry:
    """``gated`` (count: all values) and ``store_kv`` (tokens × kv_width)."""
    return Geometry((-(-count // VALUES_BLOCK),), (VALUES_BLOCK,))
