"""A conversation's record as the worker knows it: token ids, version, and their text. *Pure.*"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.tape import Tape, common_prefix

_ITEM_BYTES = 4


def ids_from_raw(raw: bytes, count: int, n_vocab: int | None = None) -> Tokens:
    """The ids of a raw int32 LE buffer.

    Raises:
        InvalidArgument: ``bad_transcript``: another length than ``count`` says, or an id that
            the vocabulary does not have.
    """
    if len(raw) != count * _ITEM_BYTES:
        raise InvalidArgument(
            "bad_transcript",
            f"{count} token ids take {count * _ITEM_BYTES} bytes, the buffer has {len(raw)}",
            tokens=count,
            raw_bytes=len(raw),
        )
    ids = np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    check_ids(ids, n_vocab, "bad_transcript")
    return ids


def check_ids(ids: Tokens, n_vocab: int | None, reason: str) -> None:
    """Refuse ids outside of the vocabulary: llama.cpp would abort on them.

    Raises:
        InvalidArgument: ``reason``.
    """
    if len(ids) == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (n_vocab is not None and high >= n_vocab):
        bad = low if low < 0 else high
        raise InvalidArgument(
            reason,
            f"token id {bad} is outside of the vocabulary of {n_vocab} tokens",
            token=bad,
            n_vocab=n_vocab,
        )


class Transcript:
    """Token ids with a state version; their text is rendered once and kept.

    Attributes:
        ids: the record.
        version: the conversation's state version.
    """

    def __init__(self) -> None:
        self.ids = Tape()
        self.version = 0
        self._text = bytearray()
        self._ends: array[int] = array("q")

    def replace(self, ids: Tokens, version: int) -> None:
        """Become ``ids`` at ``version``; what both begin with keeps its text."""
        same = common_prefix(self.ids.view(), ids)
        self._cut(same)
        self.ids.replace(ids)
        self.version = version

    def append(self, token: int) -> None:
        """Add one generated id."""
        self.ids.append(token)

    @property
    def unrendered(self) -> int:
        """How many tokens have no text yet."""
        return len(self.ids) - len(self._ends)

    def copy(self) -> Transcript:
        """One of its own that another thread may use."""
        other = Transcript()
        other.ids, other.version = Tape(self.ids.view()), self.version
        other._text, other._ends = bytearray(self._text), self._ends[:]
        return other

    def take_text(self, other: Transcript) -> None:
        """Keep what a :meth:`copy` has rendered; the record has not changed since."""
        assert other.version == self.version
        self._text, self._ends = other._text, other._ends

    def text(self, piece: Callable[[int], bytes]) -> bytes:
        """The whole record as text, by ``piece`` (control tokens rendered)."""
        for token in self.ids.view(len(self._ends)):
            self._text += piece(int(token))
            self._ends.append(len(self._text))
        return bytes(self._text)

    def tokens_within(self, text_bytes: int) -> int:
        """How many tokens lie wholly within the first ``text_bytes`` bytes of the text."""
        return bisect_right(self._ends, text_bytes)

    def end_of(self, tokens: int) -> int:
        """Length in bytes of the text of the first ``tokens`` ids."""
        return self._ends[tokens - 1] if tokens else 0

    def _cut(self, tokens: int) -> None:
        if len(self._ends) > tokens:
            del self._text[self.end_of(tokens) :]
            del self._ends[tokens:]
