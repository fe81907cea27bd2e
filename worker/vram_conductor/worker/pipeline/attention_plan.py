"""Which launches compute the attention of a batch. *Pure.*

``attention.cu`` has a kernel for runs of tokens of one sequence (prompts) and one for single tokens
(decoding); both can split the positions over several blocks where tokens alone are too few to
keep a GPU busy. The plan depends on the batch, not on the layer: it is made once per pass, and
once more for layers with a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.launch_geometry import WARP, Geometry

TILE_ROWS = 64
HEADS_AT_ONCE = 4
BLOCK = 128
"""Of the kernels: tokens × heads of a tile, the most heads that a block of attention_split takes,
threads of either one's block."""

RUN_TOKENS = 8
"""From so many successive tokens of one sequence on, a tile that reads the positions once pays."""

SPLIT_POSITIONS = 256
"""Fewer positions per block are not worth the combining launch."""

TILE_BLOCKS, SPLIT_BLOCKS = 2, 4
"""Blocks of either kernel that a multiprocessor holds: more splits than that gain nothing."""

_PARTIAL_EXTRA = 2
"""What a partial result has besides its head_dim values: its maximum and its sum."""


@dataclass(frozen=True)
class Heads:
    """Shape of a model's attention; n_head is a multiple of n_head_kv."""

    n_head: int
    n_head_kv: int
    head_dim: int

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.n_head // self.n_head_kv

    @property
    def defines(self) -> str:
        """Goes before the source of ``attention.cu``."""
        return f"#define ATTENTION_HEAD_DIM {self.head_dim}\n#define ATTENTION_GROUP {self.group}\n"


@dataclass(frozen=True)
class Part:
    """Successive tokens of a batch that one launch computes.

    Attributes:
        kernel: ``attention_tile`` or ``attention_split``.
        first: index of the first token.
        splits: blocks that share the positions of a token; with more than one, another launch
            combines what they found.
    """

    kernel: str
    first: int
    tokens: int
    splits: int


@dataclass(frozen=True)
class AttentionMemory:
    """Device addresses.

    Attributes:
        q, out: float32 (tokens, n_head, head_dim); not the same.
        k_cache, v_cache: float16 (sequences, n_ctx, n_head_kv, head_dim), aligned to 16 bytes.
        scratch: :func:`scratch_bytes`, aligned to 8; 0 where that is 0.
        position, sequence: int32 (tokens,).
    """

    q: int
    k_cache: int
    v_cache: int
    out: int
    scratch: int
    position: int
    sequence: int


@dataclass(frozen=True)
class AttentionLaunch:
    """A kernel of ``attention.cu``, its geometry and its arguments."""

    kernel: str
    geometry: Geometry
    arguments: Sequence[int | np.generic]


def plan(
    positions: NDArray[np.int32],
    sequences: NDArray[np.int32],
    heads: Heads,
    window: int,
    multiprocessors: int,
) -> list[Part]:
    """Divide a batch.

    Args:
        positions, sequences: of each token (tokens,), at least one token.
        window: positions that a token sees, its own included; 0: all.
        multiprocessors: of the device.

    Returns:
        Parts in the batch's order; every token is in one of them.
    """
    begins = np.flatnonzero(np.diff(sequences, prepend=sequences[0] - 1))
    is_run = np.diff(begins, append=len(sequences)) >= RUN_TOKENS
    # Successive runs of one kind are computed together.
    changes = np.flatnonzero(np.diff(is_run, prepend=~is_run[0]))
    firsts = begins[changes]
    ends = np.append(firsts[1:], len(sequences))
    parts: list[Part] = []
    for first, end, tile in zip(firsts, ends, is_run[changes], strict=True):
        tokens = int(end - first)
        seen = int(positions[first:end].max()) + 1
        kernel = "attention_tile" if tile else "attention_split"
        limit = (TILE_BLOCKS if tile else SPLIT_BLOCKS) * multiprocessors
        blocks = limit // _blocks(kernel, tokens, heads)
        splits = max(1, min(blocks, (min(seen, window) if window else seen) // SPLIT_POSITIONS))
        parts.append(Part(kernel, int(first), tokens, splits))
    return parts


def scratch_bytes(heads: Heads, tokens_max: int, multiprocessors: int) -> int:
    """The most that any plan for up to ``tokens_max`` tokens needs of :class:`AttentionMemory`'s
    scratch; parts use it one after another."""
    # A launch is split only while its blocks, splits counted, are within the limit; so many rows
    # has a block of each kernel.
    tile_rows = min(TILE_ROWS, tokens_max * heads.group) if tokens_max >= RUN_TOKENS else 0
    split_rows = min(HEADS_AT_ONCE, heads.group)
    most = max(TILE_BLOCKS * tile_rows, SPLIT_BLOCKS * split_rows) * multiprocessors
    return most * (heads.head_dim + _PARTIAL_EXTRA) * 4


def launches(
    parts: Sequence[Part],
    heads: Heads,
    memory: AttentionMemory,
    n_ctx: int,
    scale: float,
    window: int,
) -> Iterator[AttentionLaunch]:
    """The launches of a plan for one layer, in order, on one stream.

    Args:
        n_ctx: positions per sequence of the cache.
        scale: factor of q · k before the softmax.
        window: as the plan was made for.
    """
    for part in parts:
        first = np.int32(part.first)
        scratch = memory.scratch if part.splits > 1 else 0
        is_tile = part.kernel == "attention_tile"
        grid = (
            _tiles(part.tokens, heads) if is_tile else part.tokens,
            heads.n_head_kv * (1 if is_tile else _chunks(heads)),
            part.splits,
        )
        yield AttentionLaunch(
            part.kernel,
            Geometry(grid, (BLOCK,)),
            [
                memory.q,
                memory.k_cache,
                memory.v_cache,
                memory.out,
                scratch,
                memory.position,
                memory.sequence,
                first,
                np.int32(part.tokens),
                np.int32(heads.n_head),
                np.int32(n_ctx),
                np.float32(scale),
                np.int32(window),
            ],
        )
        if part.splits > 1:
            threads = min(BLOCK, -(-heads.head_dim // WARP) * WARP)
            yield AttentionLaunch(
                "attention_combine",
                Geometry((part.tokens * heads.n_head,), (threads,)),
                [scratch, memory.out, first, np.int32(heads.n_head), np.int32(part.splits)],
            )


def _chunks(heads: Heads) -> int:
    return -(-heads.group // HEADS_AT_ONCE)


def _tiles(tokens: int, heads: Heads) -> int:
    return -(-tokens * heads.group // TILE_ROWS)


def _blocks(kernel: str, tokens: int, heads: Heads) -> int:
    """Of a launch without splits."""
    if kernel == "attention_tile":
        return _tiles(tokens, heads) * heads.n_head_kv
    return tokens * heads.n_head_kv * _chunks(heads)
