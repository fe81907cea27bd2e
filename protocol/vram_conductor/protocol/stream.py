"""One job's output on its way to the client: sender and receiver. *Pure.*

``SendStream`` (broker) numbers and keeps every piece, meters them by credit and starts again at
any piece on RESUME. ``ReceiveStream`` (client) takes pieces in any order and any number of
times and gives each out once, in order. Both count in pieces: one TOKENS message each.
"""

from __future__ import annotations

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.protocol.piece import Piece
from vram_conductor.protocol.stream_receive import CreditDue, ReceiveStream, ResumeDue

__all__ = ["CreditDue", "Piece", "ReceiveStream", "ResumeDue", "SendStream"]


class SendStream:
    """The broker's side of one job's output; keeps it whole so that it can be resumed.

    ``append`` what the worker produced, ``take`` what may be sent. After ``finish`` and the last
    piece ``take_end`` is True once: send DONE or ERROR.

    Args:
        window: initial credit: pieces with seq < window may be sent; None is unlimited.
        bytes_max: upper bound of what is kept.
    """

    def __init__(self, window: int | None = None, bytes_max: int = limits.STREAM_BYTES_MAX) -> None:
        self._pieces: list[Piece] = []
        self._next = 0
        self._released = 0
        self._upto = window
        self._bytes = 0
        self._bytes_max = bytes_max
        self._end_taken = False
        self._finished = False
        self._attached = True

    @property
    def produced(self) -> int:
        """Number of pieces appended so far: the seq of the next one, and DONE's ``seq``."""
        return len(self._pieces)

    @property
    def kept_bytes(self) -> int:
        """Bytes accounted for the pieces that are kept."""
        return self._bytes

    @property
    def released(self) -> int:
        """Pieces with seq < released went out at some time; 0: no token got out."""
        return self._released

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def attached(self) -> bool:
        """Whether a session receives this stream."""
        return self._attached

    @property
    def sendable(self) -> int:
        """How many pieces ``take`` could give out now."""
        if not self._attached:
            return 0
        upto = self.produced if self._upto is None else min(self.produced, self._upto)
        return max(0, upto - self._next)

    def append(self, text: str, ids: tuple[int, ...] = ()) -> bool:
        """Add one piece; it is never merged with others.

        False, with nothing added, if it does not fit into ``bytes_max``: end the job then.
        """
        assert not self._finished, "append after finish"
        piece = Piece(self.produced, text, ids)
        if self._bytes + piece.kept_bytes > self._bytes_max:
            return False
        self._bytes += piece.kept_bytes
        self._pieces.append(piece)
        return True

    def credit(self, upto: int) -> None:
        """CREDIT: absolute and cumulative, so duplicates and old ones change nothing."""
        if self._upto is not None:
            self._upto = max(self._upto, upto)

    def take(self, pieces_max: int = 64) -> list[Piece]:
        """The next pieces that the credit allows; they count as sent."""
        first = self._next
        self._next += min(self.sendable, pieces_max)
        self._released = max(self._released, self._next)
        return self._pieces[first : self._next]

    def finish(self) -> None:
        """The job is over: no more ``append``. Idempotent."""
        self._finished = True

    def take_end(self) -> bool:
        """True once per attachment, when all pieces are out and the job is over.

        The terminal message needs no credit.
        """
        due = self._attached and self._finished and self._next == self.produced
        if not due or self._end_taken:
            return False
        self._end_taken = True
        return True

    def restart(self) -> bool:
        """A new attempt replaces one of which no piece got out; False if some did."""
        if self._released or self._finished:
            return False
        self._pieces.clear()
        self._bytes = 0
        return True

    def detach(self) -> None:
        """The session is gone: nothing is given out until ``resume``. Idempotent."""
        self._attached = False

    def resume(self, from_seq: int, window: int | None = None) -> None:
        """RESUME: attach again and start at ``from_seq`` with the (absolute) credit ``window``.

        Raises:
            OutOfRange: ``resume_out_of_range``: never sent so far. The stream is unchanged.
        """
        if not 0 <= from_seq <= self._released:
            raise OutOfRange(
                "resume_out_of_range",
                f"this stream can be resumed from piece 0 to {self._released}, not from "
                f"{from_seq}; ask for 0",
                from_seq=from_seq,
                first_seq=0,
                last_seq=self._released,
            )
        self._next = from_seq
        self._upto = window
        self._end_taken = False
        self._attached = True
