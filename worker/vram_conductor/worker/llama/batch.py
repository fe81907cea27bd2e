"""A ``llama_batch`` allocated once and filled through numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as ll

from vram_conductor.worker.engine import Tokens


class Batch:
    """At most ``capacity`` tokens, each of one sequence.

    Attributes:
        struct: the ``llama_batch`` whose pointers lead into the arrays below.
        last: index of each slot's last token in the batch, for slots that asked for logits.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last: dict[int, int] = {}
        self._token = np.zeros(capacity, np.int32)
        self._pos = np.zeros(capacity, np.int32)
        self._n_seq = np.ones(capacity, np.int32)
        self._seq = np.zeros(capacity, np.int32)
        self._logits = np.zeros(capacity, np.int8)
        self._ramp = np.arange(capacity, dtype=np.int32)
        # seq_id is an array of pointers, one per token; each leads to that token's one id.
        first = self._seq.ctypes.data
        self._seq_rows = first + np.arange(capacity, dtype=np.uintp) * self._seq.itemsize
        self.struct = ll.llama_batch(
            0,
            _pointer(self._token, ctypes.c_int32),
            None,
            _pointer(self._pos, ctypes.c_int32),
            _pointer(self._n_seq, ctypes.c_int32),
            _pointer(self._seq_rows, ctypes.POINTER(ctypes.c_int32)),
            _pointer(self._logits, ctypes.c_int8),
        )

    def fill(self, entries: Sequence[tuple[int, Tokens, int, bool]], outputs_max: int) -> None:
        """Write (slot, ids, first position, want logits of the last) entries.

        Raises:
            OverflowError: no tokens, more than the capacity, or more outputs than allowed:
                llama.cpp would abort the process.
        """
        self.last = {}
        end = outputs = 0
        for slot, ids, first, want in entries:
            begin, count = end, len(ids)
            if not count:
                continue
            end += count
            outputs += want
            if end > self.capacity:
                break
            if count == 1:  # scalars are four times cheaper than slices
                self._token[begin] = ids[0]
                self._pos[begin] = first
                self._seq[begin] = slot
            else:
                self._token[begin:end] = ids
                np.add(self._ramp[:count], first, out=self._pos[begin:end])
                self._seq[begin:end] = slot
                self._logits[begin:end] = 0
            self._logits[end - 1] = want
            if want:
                self.last[slot] = end - 1
        if not 0 < end <= self.capacity or outputs > outputs_max:
            self.last = {}
            raise OverflowError(
                f"a batch of {end} tokens and {outputs} outputs; this pool takes 1 to "
                f"{self.capacity} tokens and {outputs_max} outputs"
            )
        self.struct.n_tokens = end


def _pointer(array: Any, kind: type[Any]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
