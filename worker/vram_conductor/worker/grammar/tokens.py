"""A vocabulary's texts, laid out for asking which of them may follow. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.engine import Tokens


class TokenTexts:
    """The text of every token that has one. Read by many threads, changed by none.

    Attributes:
        whole: ids whose text is whole characters; their code points are in ``codes`` from
            ``offsets`` on, ``lengths`` of them.
        broken: (id, bytes) of those with a part of a character.
        ends: ids that end an answer.
    """

    def __init__(self, pieces: Sequence[bytes], ends: Sequence[int]) -> None:
        """``pieces``: by id; empty: a token that must not be in a text."""
        stops = frozenset(ends)
        whole: list[int] = []
        texts: list[str] = []
        self.broken: list[tuple[int, bytes]] = []
        for token, piece in enumerate(pieces):
            if not piece or token in stops:
                continue
            try:
                texts.append(piece.decode())
            except UnicodeDecodeError:
                self.broken.append((token, piece))
            else:
                whole.append(token)
        self.ends: Tokens = np.array(sorted(stops), np.int32)
        self.whole: Tokens = np.array(whole, np.int32)
        self.lengths: NDArray[np.int32] = np.array([len(text) for text in texts], np.int32)
        self.offsets = (np.cumsum(self.lengths, dtype=np.int32) - self.lengths).astype(np.int32)
        joined = "".join(texts)
        # A CR LF pair or the like stays as it is: nothing is normalised on the way.
        self.codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
        self._pieces = pieces
        self._stops = stops

    def is_end(self, token: int) -> bool:
        """Whether it ends an answer."""
        return token in self._stops

    def piece(self, token: int) -> bytes:
        """The bytes of a token; empty where it has no text."""
        return self._pieces[token]
