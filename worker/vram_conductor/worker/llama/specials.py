"""Finding a vocabulary's special tokens in a text, in time proportional to the text. *Pure.*

llama.cpp looks for every special token in turn, the longest first, and counts its way to the place
of each find: with the 6,400 of Gemma 3 a ``<`` costs 0.1 ms, and blank lines cost the square of
their number. One scan from left to right that takes the longest token at each place finds the
same ones, unless a token that begins within another one and ends behind it would have gone first;
:attr:`Specials.exact` says whether a vocabulary can have such a text at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

_DEPTH_MAX = 200
"""Branchings of a pattern; deeper ones are too deep for Python's compiler of patterns."""


class Specials:
    """The special tokens of one vocabulary, by (text, id).

    Attributes:
        exact: :meth:`split` finds what llama.cpp finds. If False it must not be used.
    """

    def __init__(self, tokens: Sequence[tuple[bytes, int]]) -> None:
        self._ids = dict(tokens)
        self._pattern: re.Pattern[bytes] | None = None
        # Of two with the same text llama.cpp takes one or the other.
        self.exact = len(self._ids) == len(tokens) and b"" not in self._ids
        if not self.exact or not tokens:
            return
        try:
            self._pattern = re.compile(_pattern(sorted(self._ids)))
        except (RecursionError, OverflowError):
            self.exact = False
            return
        self.exact = not self._has_rivals(self._pattern)

    def split(self, data: bytes) -> Iterator[bytes | int]:
        """``data`` in order: ids of special tokens, and the text between them."""
        end = 0
        if self._pattern is not None:
            for match in self._pattern.finditer(data):
                start = match.start()
                if start > end:
                    yield data[end:start]
                yield self._ids[match[0]]
                end = match.end()
        if end < len(data):
            yield data[end:]

    def _has_rivals(self, pattern: re.Pattern[bytes]) -> bool:
        """Whether a token, found first from the left, may lose to one that overlaps it and is no
        shorter."""
        heads: dict[bytes, list[bytes]] = {}
        for text in self._ids:
            for length in range(1, len(text)):
                heads.setdefault(text[:length], []).append(text)
        for text in self._ids:
            for start in range(1, len(text)):
                overlap = text[start:]
                for other in heads.get(overlap, ()):
                    if other == text or len(other) < len(text):
                        continue
                    found = pattern.match(text + other[len(overlap) :])
                    # Where a longer one begins at the same place it goes before both.
                    if found is not None and found[0] == text:
                        return True
        return False


def _pattern(texts: Sequence[bytes], depth: int = 0) -> bytes:
    """A pattern that takes the longest of ``texts`` (sorted, all different), with one branch per
    next byte, so that a match costs its own length however many texts there are."""
    if depth > _DEPTH_MAX:
        raise RecursionError
    if len(texts) == 1:
        return re.escape(texts[0])
    head = _common_head(texts[0], texts[-1])
    may_end = len(texts[0]) == head
    rests = [text[head:] for text in texts if len(text) > head]
    groups = groupby(rests, key=lambda rest: rest[0])
    branches = b"|".join(_pattern(list(group), depth + 1) for _, group in groups)
    if depth == 0 and head == 0:
        # Without a group around it Python knows which bytes a match can begin with.
        return branches
    return re.escape(texts[0][:head]) + b"(?:" + branches + (b")?" if may_end else b")")


def _common_head(first: bytes, last: bytes) -> int:
    """Length of the beginning that a sorted list has in common, by its first and last item."""
    pairs = enumerate(zip(first, last, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(last)))
