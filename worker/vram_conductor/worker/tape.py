"""A growing sequence of token ids. *Pure.*"""

from __future__ import annotations

import numpy as np

from vram_conductor.worker.engine import Tokens

_EMPTY = np.empty(0, np.int32)


class Tape:
    """Token ids that grow and shrink at the end, in one int32 array with spare room."""

    __slots__ = ("_array", "_length")

    def __init__(self, ids: Tokens = _EMPTY) -> None:
        self._array: Tokens = np.array(ids, dtype=np.int32)
        self._length = len(self._array)

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        """Add one id."""
        self._reserve(1)
        self._array[self._length] = token
        self._length += 1

    def extend(self, ids: Tokens) -> None:
        """Add ids."""
        self._reserve(len(ids))
        self._array[self._length : self._length + len(ids)] = ids
        self._length += len(ids)

    def truncate(self, length: int) -> None:
        """Forget everything from ``length`` on."""
        self._length = min(self._length, max(0, length))

    def replace(self, ids: Tokens) -> None:
        """Hold ``ids`` instead."""
        self._array = np.array(ids, dtype=np.int32)
        self._length = len(self._array)

    def view(self, start: int = 0, stop: int | None = None) -> Tokens:
        """Ids ``start`` … ``stop``, not copied: good until the tape changes."""
        end = self._length if stop is None else min(stop, self._length)
        return self._array[min(start, end) : end]

    def ids(self) -> Tokens:
        """A copy of all ids."""
        return self._array[: self._length].copy()

    def last(self) -> int:
        """The last id; the tape must not be empty."""
        assert self._length
        return int(self._array[self._length - 1])

    def _reserve(self, more: int) -> None:
        need = self._length + more
        if need > len(self._array):
            grown: Tokens = np.empty(max(need, 2 * len(self._array), 64), np.int32)
            grown[: self._length] = self._array[: self._length]
            self._array = grown


def common_prefix(one: Tokens, other: Tokens) -> int:
    """How many ids ``one`` and ``other`` begin with in common."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
