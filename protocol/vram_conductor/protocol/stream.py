"""One job's output on its way to the client: sender and receiver. *Pure.*

``SendStream`` (broker) numbers and keeps every piece, meters them by credit and starts again at
any piece on RESUME. ``ReceiveStream`` (client) takes pieces in any order and any number of
times and gives each out once, in order. Both count in pieces (one TOKENS message each).
"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol import limits


@dataclass(frozen=True, slots=True)
class Piece:
    """One TOKENS message: ``seq`` counts 0, 1, 2 … per job."""

    seq: int
    text: str
    ids: tuple[int, ...] = ()


class SendStream:
    """The broker's side of one job's output; keeps it whole so that it can be resumed.

    Usage: ``append`` what the worker produced, ``take`` what may be sent, and if the socket did
    not accept a piece, ``rewind`` to it. After ``finish`` and the last piece, ``take_end`` is
    True once: send DONE or ERROR.

    Args:
        window: initial credit: pieces with seq < window may be sent; None is unlimited.
        bytes_max: upper bound of what is kept.
    """

    def __init__(self, window: int | None = None, bytes_max: int = limits.STREAM_BYTES_MAX) -> None:
        raise NotImplementedError

    @property
    def produced(self) -> int:
        """Number of pieces appended so far: the seq of the next one, and DONE's ``seq``."""
        raise NotImplementedError

    @property
    def kept_bytes(self) -> int:
        """Bytes accounted for the pieces that are kept."""
        raise NotImplementedError

    @property
    def released(self) -> int:
        """Highest seq ever given to the socket, plus one: 0 means that no token got out."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    @property
    def attached(self) -> bool:
        """Whether a session receives this stream."""
        raise NotImplementedError

    def append(self, text: str, ids: tuple[int, ...] = ()) -> bool:
        """Add one piece (never merged with others). False, with nothing added, if it does not
        fit into ``bytes_max``: end the job."""
        raise NotImplementedError

    def credit(self, ack: int, upto: int) -> None:
        """CREDIT: absolute and cumulative, so duplicates and old ones change nothing."""
        raise NotImplementedError

    def take(self, pieces_max: int = 64) -> list[Piece]:
        """The next pieces that the credit allows; they count as sent."""
        raise NotImplementedError

    def rewind(self, seq: int) -> None:
        """The socket did not accept the piece ``seq``: send it and what follows again."""
        raise NotImplementedError

    def finish(self, now_ns: int) -> None:
        """The job is over: no more ``append``. Idempotent."""
        raise NotImplementedError

    def take_end(self) -> bool:
        """True once per attachment, when all pieces are out and the job is over. The terminal
        message needs no credit. ``rewind(produced)`` asks for it again."""
        raise NotImplementedError

    def detach(self, now_ns: int) -> None:
        """The session is gone: ``take`` gives nothing until ``resume``."""
        raise NotImplementedError

    def resume(self, from_seq: int, window: int | None = None) -> None:
        """RESUME: attach again, start at ``from_seq`` with the credit ``window`` (absolute).

        Raises:
            OutOfRange: ``resume_out_of_range``: beyond what was produced, or trimmed away.
        """
        raise NotImplementedError

    def trim(self) -> int:
        """Drop the pieces that the client acknowledged; returns the bytes freed."""
        raise NotImplementedError

    def orphaned(self, now_ns: int, orphan_ms: int = limits.ORPHAN_MS) -> bool:
        """Detached for longer than ``orphan_ms``."""
        raise NotImplementedError

    def expired(self, now_ns: int, keep_ms: int = limits.RESULT_KEEP_MS) -> bool:
        """Finished for longer than ``keep_ms``: forget it."""
        raise NotImplementedError


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

    Usage: ``offer`` each TOKENS, ``end`` at DONE/ERROR, ``take`` until None; after a take ask
    ``credit_due``, after an offer or end ask ``resume_due``; after a reconnect send ``resume()``.

    Args:
        window: how many pieces may be on the way or unread; None is unlimited credit.
    """

    def __init__(self, window: int | None = None) -> None:
        raise NotImplementedError

    @property
    def initial_window(self) -> int | None:
        """DECODE.window."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """The terminal message is known and every piece before it was taken."""
        raise NotImplementedError

    @property
    def received(self) -> int:
        """All pieces with seq < received have arrived."""
        raise NotImplementedError

    def offer(self, seq: int, text: str, ids: tuple[int, ...] = ()) -> bool:
        """A TOKENS arrived. True if ``take`` has something now that it had not before."""
        raise NotImplementedError

    def end(self, seq: int | None) -> None:
        """DONE or ERROR arrived; ``seq`` is one past the last piece (None: what has come)."""
        raise NotImplementedError

    def take(self) -> Piece | None:
        """The next piece in order, or None if it has not arrived."""
        raise NotImplementedError

    def credit_due(self) -> CreditDue | None:
        """The CREDIT to send now: when half of the window was taken since the last one."""
        raise NotImplementedError

    def resume_due(self) -> ResumeDue | None:
        """The RESUME to send now because a piece is missing; once until there is progress."""
        raise NotImplementedError

    def resume(self) -> ResumeDue:
        """The RESUME to send after a reconnect."""
        raise NotImplementedError
