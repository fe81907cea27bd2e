"""One answer that follows a grammar: which tokens may come next. *Pure.*"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.grammar.automaton import Automaton
from vram_conductor.worker.grammar.gbnf import parse
from vram_conductor.worker.grammar.matcher import Matcher, Place
from vram_conductor.worker.grammar.rules import CHAR_MAX
from vram_conductor.worker.grammar.tokens import TokenTexts

_SURROGATES = (0xD800, 0xDFFF)
_KEYS_MAX = 1 << 20

TOKENS_KEPT_MAX = 4_000_000
"""Ids that are remembered as what may follow, over all places; 16 MB. Inside a string that is most
of a vocabulary, and where characters are counted each of them is another place."""


class Constraint:
    """The state of one job; it needs no open model. One thread at a time.

    Args:
        grammar: GBNF, beginning with the rule ``root``.
        texts: the model's vocabulary.

    Raises:
        InvalidArgument: ``bad_grammar``. OutOfRange: ``grammar_too_complex``.
        ResourceExhausted: ``grammar_too_ambiguous``.
    """

    def __init__(self, grammar: str, texts: TokenTexts) -> None:
        self._texts = texts
        self._automaton = Automaton(parse(grammar))
        self._matcher = Matcher(self._automaton)
        self._place = self._matcher.start
        self._pending = b""
        # A place that nothing leads to any more goes, with what is remembered of it.
        self._kept = weakref.WeakSet[Place]()
        self._kept_tokens = 0
        boundaries = np.array(self._automaton.boundaries, np.uint32)
        self._classes: NDArray[np.intp] = np.searchsorted(boundaries, texts.codes, side="right")

    @property
    def finished(self) -> bool:
        """Nothing may follow but the end."""
        return self._place.finished and not self._pending

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``.
        """
        return self._allows(token)

    def among(self, tokens: Tokens) -> Tokens:
        """Those of ``tokens`` that may come next.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``.
        """
        return np.array([token for token in tokens.tolist() if self._allows(token)], np.int32)

    @property
    def known(self) -> bool:
        """Whether :meth:`allowed` has the answer already."""
        return not self._pending and self._place.tokens is not None

    def allowed(self) -> Tokens:
        """All tokens that may come next, ascending; empty: a dead end.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``.
        """
        if self._pending:
            return self._unite([self._broken()])
        if self._place.tokens is None:
            ends = self._texts.ends if self._place.complete else self._texts.ends[:0]
            self._keep(self._unite([ends, self._broken(), self._whole()]))
        found = self._place.tokens
        assert found is not None
        return found

    def _keep(self, tokens: Tokens) -> None:
        """Remember what may follow here; before it becomes too much, forget all the rest."""
        self._kept_tokens += len(tokens)
        if self._kept_tokens > TOKENS_KEPT_MAX:
            for place in self._kept:
                place.tokens = None
            self._kept.clear()
            self._kept_tokens = len(tokens)
        self._place.tokens = tokens
        self._kept.add(self._place)

    def accept(self, token: int) -> None:
        """``token``, which is allowed, comes next.

        Raises:
            ResourceExhausted: ``grammar_too_ambiguous``.
        """
        if self._texts.is_end(token):
            return
        after = self._after(self._texts.piece(token))
        assert after is not None
        self._place, self._pending = after
        self._matcher.earn()
        self._matcher.forget(self._place)

    @staticmethod
    def _unite(parts: list[Tokens]) -> Tokens:
        return np.sort(np.concatenate(parts))

    def _allows(self, token: int) -> bool:
        if self._texts.is_end(token):
            return self._place.complete and not self._pending
        return self._after(self._texts.piece(token)) is not None

    def _after(self, piece: bytes) -> tuple[Place, bytes] | None:
        """The place behind ``piece``, and the bytes of a character that is not whole yet."""
        if not piece:
            return None
        text, rest = _decode(self._pending + piece)
        if text is None:
            return None
        place = self._place
        for char in text:
            after = self._matcher.step(place, self._automaton.class_of(ord(char)))
            if after is None:
                return None
            place = after
        if rest and not self._may_become(place, rest):
            return None
        return place, rest

    def _may_become(self, place: Place, rest: bytes) -> bool:
        """Whether a character that begins with ``rest`` may follow."""
        low, high = _completions(rest)
        if low > high:
            return False
        first, last = self._automaton.class_of(low), self._automaton.class_of(high)
        return any(
            self._matcher.step(place, char_class) is not None
            for char_class in range(first, last + 1)
        )

    def _broken(self) -> Tokens:
        """Which tokens with a part of a character may follow."""
        found = [token for token, piece in self._texts.broken if self._after(piece) is not None]
        return np.array(found, np.int32)

    def _whole(self) -> Tokens:
        """Which tokens of whole characters may follow: all at once, one character after the
        other."""
        texts, classes = self._texts, self._classes
        places: list[Place] = [self._place]
        width = len(self._automaton.boundaries) + 1
        index = np.arange(len(texts.whole))
        at = np.zeros(len(index), np.intp)
        done: list[NDArray[np.intp]] = []
        depth = 0
        while len(index):
            keys = at * width + classes[texts.offsets[index] + depth]
            distinct, at = _distinct(keys, len(places) * width)
            wanted: list[int] = distinct.tolist()
            found = [self._matcher.step(places[key // width], key % width) for key in wanted]
            alive = np.array([place is not None for place in found], bool)
            places = [place for place in found if place is not None]
            keep = alive[at]
            at, index = (np.cumsum(alive) - 1)[at[keep]], index[keep]
            depth += 1
            over = texts.lengths[index] == depth
            done.append(index[over])
            index, at = index[~over], at[~over]
        return texts.whole[np.concatenate(done)] if done else texts.whole[:0]


def _distinct(keys: NDArray[np.intp], below: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The distinct keys, all less than ``below``, and for each key which of these it is."""
    if below > _KEYS_MAX:
        distinct, inverse = np.unique(keys, return_inverse=True)
        return distinct, inverse
    there = np.zeros(below, bool)
    there[keys] = True
    distinct = np.flatnonzero(there)
    number = np.zeros(below, np.intp)
    number[distinct] = np.arange(len(distinct))
    return distinct, number[keys]


def _decode(data: bytes) -> tuple[str | None, bytes]:
    """The characters, and what may be the beginning of another; (None, b"") if it is no UTF-8."""
    try:
        return data.decode(), b""
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None, b""
        return data[: error.start].decode(), data[error.start :]


def _completions(rest: bytes) -> tuple[int, int]:
    """First and last character that may begin with these bytes (RFC 3629, section 4)."""
    lead = rest[0]
    length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    value = lead & (0x7F >> length)
    for byte in rest[1:]:
        value = value << 6 | byte & 0x3F
    missing = 6 * (length - len(rest))
    low, high = value << missing, (value + 1 << missing) - 1
    low = max(low, (0x80, 0x800, 0x10000)[length - 2])
    high = min(high, CHAR_MAX)
    if low < _SURROGATES[0] <= high:
        high = _SURROGATES[0] - 1
    return low, high
