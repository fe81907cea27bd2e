"""Which positions of each sequence a KV cache holds, and which batches may follow. *Pure.*

The keys and values themselves are where the forward pass computes, laid out as [layer][key or
value][sequence][position][head × dimension], float16. Attention reads every position up to the
token's own, so a sequence must have no hole: a batch goes on where the sequence ends, or starts
earlier and drops what follows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import InvalidArgument, OutOfRange
from vram_conductor.worker.pipeline.forward import Batch, Capacity

HALF_BYTES = 2


def kv_bytes(capacity: Capacity, n_layer: int, kv_width: int) -> int:
    """Size of the cache; ``kv_width`` is heads × dimension of the keys of one position."""
    return 2 * n_layer * capacity.sequences * capacity.n_ctx * kv_width * HALF_BYTES


class KvCache:
    """The lengths of all sequences.

    Attributes:
        lengths: positions held, per sequence (sequences,).
    """

    def __init__(self, capacity: Capacity, n_vocab: int) -> None:
        self._capacity = capacity
        self._n_vocab = n_vocab
        self.lengths: NDArray[np.int32] = np.zeros(capacity.sequences, np.int32)

    def check(self, batch: Batch) -> None:
        """Whether the batch may be computed next; changes nothing.

        Raises:
            InvalidArgument: ``batch_too_large``, ``too_many_wanted``, ``token_out_of_range``,
                ``sequence_out_of_range``, ``wanted_out_of_range``, ``position_gap``.
            OutOfRange: ``context_full``: a position at or beyond n_ctx.
        """
        room, count = self._capacity, len(batch)
        if count > room.tokens_max:
            raise InvalidArgument(
                "batch_too_large",
                f"{count} tokens in one step; this engine takes {room.tokens_max}: split the "
                "batch, or open it with a larger tokens_max",
                tokens=count,
                tokens_max=room.tokens_max,
            )
        if len(batch.wanted) > room.wanted_max:
            raise InvalidArgument(
                "too_many_wanted",
                f"logits of {len(batch.wanted)} tokens are wanted; this engine has room for "
                f"{room.wanted_max}: open it with a larger wanted_max",
                wanted=len(batch.wanted),
                wanted_max=room.wanted_max,
            )
        _within("token_out_of_range", batch.tokens, self._n_vocab, "the vocabulary's size")
        _within("sequence_out_of_range", batch.sequences, room.sequences, "the engine's sequences")
        _within("wanted_out_of_range", batch.wanted, count, "the batch's tokens")
        for sequence in np.unique(batch.sequences):
            self._check_positions(int(sequence), batch.positions[batch.sequences == sequence])

    def _check_positions(self, sequence: int, positions: NDArray[np.int32]) -> None:
        last, n_ctx = int(positions.max()), self._capacity.n_ctx
        if last >= n_ctx:
            raise OutOfRange(
                "context_full",
                f"position {last} of sequence {sequence} is beyond its context of {n_ctx} "
                "tokens: start again, or open the engine with a larger n_ctx",
                sequence=sequence,
                position=last,
                n_ctx=n_ctx,
            )
        first, held = int(positions.min()), int(self.lengths[sequence])
        run = np.arange(first, first + len(positions))
        if not 0 <= first <= held or not np.array_equal(np.sort(positions), run):
            raise InvalidArgument(
                "position_gap",
                f"sequence {sequence} holds {held} positions; {len(positions)} tokens at "
                f"positions {first} to {last} do not follow each other from {held} or earlier",
                sequence=sequence,
                held=held,
                first=first,
                last=last,
                tokens=len(positions),
            )

    def forget(self, batch: Batch) -> None:
        """Drop what the batch will overwrite and all after it: before it is computed."""
        np.minimum.at(self.lengths, batch.sequences, batch.positions)

    def keep(self, batch: Batch) -> None:
        """The batch has been computed."""
        np.maximum.at(self.lengths, batch.sequences, batch.positions + 1)

    def reset(self) -> None:
        """All sequences are empty."""
        self.lengths[:] = 0


def _within(reason: str, values: NDArray[np.int32], end: int, what: str) -> None:
    wrong = values[(values < 0) | (values >= end)]
    if len(wrong):
        raise InvalidArgument(
            reason,
            f"{reason.split('_')[0]} {wrong[0]} is not within 0 to {end - 1} ({what}: {end})",
            value=int(wrong[0]),
            end=end,
        )
