"""One job's output as it arrives: put in order, each piece given out once. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.piece import Piece

AHEAD_PIECES_MAX = 65_536
"""Pieces behind a gap that a receiver keeps; RESUME brings the others again."""


@dataclass(frozen=True, slots=True)
class CreditDue:
    """Arguments of the CREDIT to send."""

    ack: int
    upto: int


@dataclass(frozen=True, slots=True)
class ResumeDue:
    """Arguments of the RESUME to send."""

    from_seq: int
    window: int | None


class ReceiveStream:
    """The client's side: any order and duplicates in, every piece once and in order out.

    ``offer`` each TOKENS, ``end`` at DONE or ERROR, ``take`` until None. After a take ask
    ``credit_due``, after an offer or end ask ``resume_due``; after a reconnect send ``resume()``.

    Args:
        window: how many pieces may be on the way or unread; None is unlimited credit.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._upto = window
        self._ready: dict[int, Piece] = {}
        self._received = 0
        self._taken = 0
        self._end: int | None = None
        self._asked_at: int | None = None

    @property
    def initial_window(self) -> int | None:
        """DECODE.window."""
        return self._window

    @property
    def received(self) -> int:
        """All pieces with seq < received have arrived."""
        return self._received

    @property
    def taken(self) -> int:
        """All pieces with seq < taken were given out."""
        return self._taken

    @property
    def complete(self) -> bool:
        """The terminal message is known and every piece before it was taken."""
        return self._end is not None and self._taken >= self._end

    def offer(self, seq: int, text: str, ids: tuple[int, ...] = ()) -> bool:
        """A TOKENS arrived. True if ``take`` has something now that it had not before."""
        if seq < self._received or seq in self._ready:
            return False
        if seq - self._received > AHEAD_PIECES_MAX or (self._end is not None and seq >= self._end):
            return False
        self._ready[seq] = Piece(seq, text, ids)
        before = self._received
        while self._received in self._ready:
            self._received += 1
        return self._received > before

    def end(self, seq: int | None) -> None:
        """DONE or ERROR arrived; ``seq`` is one past the last piece (None: what has come)."""
        if self._end is None:
            self._end = max(self._received, self._received if seq is None else seq)

    def take(self) -> Piece | None:
        """The next piece in order, or None if it has not arrived."""
        if self._taken == self._received:
            return None
        piece = self._ready.pop(self._taken)
        self._taken += 1
        return piece

    def credit_due(self) -> CreditDue | None:
        """The CREDIT to send now: half of the window was taken since the last one."""
        if self._window is None or self._upto is None or self._end is not None:
            return None
        upto = self._taken + self._window
        if upto - self._upto < max(1, self._window // 2):
            return None
        self._upto = upto
        return CreditDue(self._received, upto)

    def resume_due(self) -> ResumeDue | None:
        """The RESUME to send now because a piece is missing; once until there is progress.

        One connection keeps the order, so a gap means that something was lost.
        """
        ahead = len(self._ready) > self._received - self._taken
        short = self._end is not None and self._received < self._end
        if not (ahead or short) or self._asked_at == self._received:
            return None
        return self.resume()

    def resume(self) -> ResumeDue:
        """The RESUME to send after a reconnect."""
        self._asked_at = self._received
        if self._window is not None:
            self._upto = self._taken + self._window
        return ResumeDue(self._received, self._upto)
