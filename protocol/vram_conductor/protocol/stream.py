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

    ``append`` what the worker produced, ``take`` what may be sent and, if the socket did not
    accept a piece, ``rewind`` to it. After ``finish`` and the last piece ``take_end`` is True
    once: send DONE or ERROR.

    Args:
        window: initial credit: pieces with seq < window may be sent; None is unlimited.
        bytes_max: upper bound of what is kept.
    """

    def __init__(self, window: int | None = None, bytes_max: int = limits.STREAM_BYTES_MAX) -> None:
        self._pieces: list[Piece] = []
        self._first = 0
        self._next = 0
        self._confirmed = 0
        self._ack = 0
        self._upto = window
        self._bytes = 0
        self._bytes_max = bytes_max
        self._end_taken = False
        self._finished_ns: int | None = None
        self._detached_ns: int | None = None

    @property
    def produced(self) -> int:
        """Number of pieces appended so far: the seq of the next one, and DONE's ``seq``."""
        return self._first + len(self._pieces)

    @property
    def kept_bytes(self) -> int:
        """Bytes accounted for the pieces that are kept."""
        return self._bytes

    @property
    def released(self) -> int:
        """Pieces with seq < released went to the socket at some time; 0: no token got out."""
        return max(self._confirmed, self._next)

    @property
    def acked(self) -> int:
        """The client has all pieces with seq < acked."""
        return self._ack

    @property
    def finished(self) -> bool:
        return self._finished_ns is not None

    @property
    def attached(self) -> bool:
        """Whether a session receives this stream."""
        return self._detached_ns is None

    def append(self, text: str, ids: tuple[int, ...] = ()) -> bool:
        """Add one piece; it is never merged with others.

        False, with nothing added, if it does not fit into ``bytes_max``: end the job then.
        """
        assert not self.finished, "append after finish"
        piece = Piece(self.produced, text, ids)
        if self._bytes + piece.kept_bytes > self._bytes_max:
            return False
        self._bytes += piece.kept_bytes
        self._pieces.append(piece)
        return True

    def credit(self, ack: int, upto: int) -> None:
        """CREDIT: absolute and cumulative, so duplicates and old ones change nothing."""
        self._ack = max(self._ack, min(ack, self.released))
        if self._upto is not None:
            self._upto = max(self._upto, upto)

    def take(self, pieces_max: int = 64) -> list[Piece]:
        """The next pieces that the credit allows; they count as sent."""
        if not self.attached:
            return []
        self._confirmed = max(self._confirmed, self._next)
        stop = self.produced if self._upto is None else min(self.produced, self._upto)
        stop = min(stop, self._next + pieces_max)
        if stop <= self._next:
            return []
        taken = self._pieces[self._next - self._first : stop - self._first]
        self._next = stop
        return taken

    def rewind(self, seq: int) -> None:
        """The socket did not accept piece ``seq`` of the last take: send from there again.

        ``rewind(produced)`` gives the terminal message back.
        """
        self._next = max(self._first, min(self._next, seq))
        self._end_taken = False

    def finish(self, now_ns: int) -> None:
        """The job is over: no more ``append``. Idempotent."""
        if self._finished_ns is None:
            self._finished_ns = now_ns

    def take_end(self) -> bool:
        """True once per attachment, when all pieces are out and the job is over.

        The terminal message needs no credit.
        """
        due = self.attached and self.finished and self._next == self.produced
        if not due or self._end_taken:
            return False
        self._end_taken = True
        return True

    def restart(self) -> bool:
        """A new attempt replaces one of which no piece got out; False if some did."""
        if self.released or self.finished:
            return False
        self._pieces.clear()
        self._bytes = 0
        return True

    def detach(self, now_ns: int) -> None:
        """The session is gone: nothing is given out until ``resume``. Idempotent."""
        if self._detached_ns is None:
            self._detached_ns = now_ns

    def resume(self, from_seq: int, window: int | None = None) -> None:
        """RESUME: attach again and start at ``from_seq`` with the (absolute) credit ``window``.

        Raises:
            OutOfRange: ``resume_out_of_range``: never sent so far, or trimmed away. The stream
                is unchanged.
        """
        if not self._first <= from_seq <= self.released:
            raise OutOfRange(
                "resume_out_of_range",
                f"this stream can be resumed from piece {self._first} to {self.released}, "
                f"not from {from_seq}; ask for {self._first}",
                from_seq=from_seq,
                first_seq=self._first,
                last_seq=self.released,
            )
        self._confirmed = self.released
        self._next = self._ack = from_seq
        self._upto = window
        self._end_taken = False
        self._detached_ns = None

    def trim(self) -> int:
        """Drop the pieces that the client acknowledged; returns the bytes freed.

        A later RESUME cannot go back before them: do this only when memory is short.
        """
        count = min(self._ack, self._next) - self._first
        if count <= 0:
            return 0
        freed = sum(piece.kept_bytes for piece in self._pieces[:count])
        del self._pieces[:count]
        self._first += count
        self._bytes -= freed
        return freed

    def orphaned(self, now_ns: int, orphan_ms: int = limits.ORPHAN_MS) -> bool:
        """Detached for ``orphan_ms`` or longer."""
        since = self._detached_ns
        return since is not None and now_ns - since >= orphan_ms * 1_000_000

    def expired(self, now_ns: int, keep_ms: int = limits.RESULT_KEEP_MS) -> bool:
        """Finished for ``keep_ms`` or longer: forget it."""
        since = self._finished_ns
        return since is not None and now_ns - since >= keep_ms * 1_000_000
