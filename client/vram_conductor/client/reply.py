"""The reply to one DECODE, for blocking callers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import msgspec

from vram_conductor.client.effects import (
    Answered,
    Failed,
    Finished,
    News,
    Output,
    Queued,
    RequestEffect,
)
from vram_conductor.client.inbox import Inbox
from vram_conductor.client.io_thread import IoThread
from vram_conductor.protocol.errors import ConductorError, DeadlineExceeded, error_from_info
from vram_conductor.protocol.messages import Decode
from vram_conductor.protocol.values import Usage


class Result(msgspec.Struct, frozen=True):
    """A whole reply.

    Attributes:
        text: all of its text; equals the concatenated pieces.
        ids: its token ids, with ``return_ids=True``; else empty.
        usage: the receipt: tokens, times in milliseconds, what was swapped.
    """

    text: str
    ids: list[int]
    usage: Usage


class ReplyState:
    """What is known of a reply so far. Both kinds of reply are made of it.

    Attributes:
        rid: the job's id, 16 bytes.
        ids: token ids so far, with ``return_ids=True``.
        usage: the receipt; None until the end.
        queued: the broker's answer: ``job``, ``position`` (jobs ahead), ``est_ms``; None before.
        progress: the last news of a slow start; None if there was none.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.rid: bytes = decode.rid
        self.ids: list[int] = []
        self.usage: Usage | None = None
        self.queued: Queued | None = None
        self.progress: News | None = None
        self.error: ConductorError | None = None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def over(self) -> bool:
        return self.usage is not None or self.error is not None

    def take(self, effect: RequestEffect) -> str:
        """Note what happened; returns the text that it brought, if any."""
        match effect:
            case Output():
                self._pieces.append(effect.text)
                self.ids.extend(effect.ids)
                return effect.text
            case Queued():
                self.queued = effect
            case News():
                self.progress = effect
            case Finished():
                self.usage = effect.usage
            case Failed():
                self.error = effect.error
            case Answered():
                pass
        return ""

    def result(self) -> Result:
        """The whole of it, once it is :attr:`over`; raises the error it ended with."""
        if self.error is not None:
            # A fresh one each time: an exception that is raised in two threads is garbled.
            raise error_from_info(self.error.info)
        assert self.usage is not None
        return Result(self.text, self.ids, self.usage)


def refill(window: int) -> int:
    """How many pieces a reader with this window asks for at a time."""
    return max(1, window // 4)


class Reply(Iterator[str]):
    """A running reply: iterate over it for pieces of text, or take :meth:`result`.

    As a context manager it cancels the job when the block is left before the end; so does
    forgetting it (unless ``detach=True``). It may be used from several threads; each piece then
    goes to one of them.

    >>> with Conductor() as conductor:
    ...     coder = conductor.register("coder", "smollm2-135m", n_ctx=1024, temperature=0)
    ...     with coder.chat("Count to three.", max_tokens=16) as reply:
    ...         for piece in reply:
    ...             print(piece, end="|")
    one|, two|, three.|
    >>> reply.text
    'one, two, three.'
    >>> reply.result().usage.stop_reason
    'eos'
    """

    def __init__(self, io: IoThread, decode: Decode, answer_ms: int, owner: object) -> None:
        self._state = ReplyState(decode)
        self._io = io
        # Keeps the Conductor open while somebody reads.
        self._owner = owner
        self._inbox = Inbox()
        self._lock = threading.RLock()
        self._asked: int | None = 0
        io.submit(
            decode.rid,
            self._inbox.put,
            lambda core, now_ns: core.decode(decode, answer_ms, now_ns),
        )

    @property
    def rid(self) -> bytes:
        """The job's id, 16 bytes."""
        return self._state.rid

    @property
    def text(self) -> str:
        """The text that was read so far. Does not wait."""
        return self._state.text

    @property
    def ids(self) -> list[int]:
        """The token ids that were read so far, with ``return_ids=True``. Does not wait."""
        return list(self._state.ids)

    @property
    def usage(self) -> Usage | None:
        """The receipt; None before the end was read. Does not wait."""
        return self._state.usage

    @property
    def queued(self) -> Queued | None:
        """The broker's confirmation, with ``position`` in the queue and ``est_ms``; None before
        it was read. Does not wait."""
        return self._state.queued

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """The next piece of text, as soon as it is there.

        Raises:
            StopIteration: the reply is complete.
            ConductorError: the job failed; :attr:`text` has what came before.
        """
        with self._lock:
            while not self._state.over:
                self._ask(refill(self._state.decode.window or 1))
                if text := self._next_text(None):
                    return text
            self._state.result()
            raise StopIteration

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the end; the whole reply.

        Args:
            timeout_s: how long to wait, in seconds; None: as long as it takes.

        Raises:
            DeadlineExceeded: ``not_finished``: it takes longer; the job goes on.
            ConductorError: the job failed; :attr:`text` has what came before.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            raise _not_finished(timeout_s)
        try:
            while not self._state.over:
                self._ask(None)
                left_s = None if until is None else max(0.0, until - time.monotonic())
                if self._next_text(left_s) is None:
                    raise _not_finished(timeout_s)
            return self._state.result()
        finally:
            self._lock.release()

    def cancel(self) -> None:
        """End the job within one decode step. Does not wait; :meth:`result` then has what came
        before, with ``stop_reason="cancelled"``. Idempotent, harmless after the end."""
        if not self._state.over:
            rid = self.rid
            self._io.check_process()
            self._io.post(lambda core, now_ns: core.cancel(rid, now_ns))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._state.decode.detach and not self._io.inherited:
            self.cancel()

    def __del__(self) -> None:
        # __init__ may have failed half-way.
        io: IoThread | None = getattr(self, "_io", None)
        if io is None or self._state.over or io.inherited:
            return
        rid = self.rid
        io.drop(rid)
        if self._state.decode.detach:
            io.post(lambda core, now_ns: core.want(rid, None, now_ns))
        else:
            io.post(lambda core, now_ns: core.cancel(rid, now_ns))

    def _ask(self, pieces: int | None) -> None:
        """With a window: let so many pieces in, if nothing was asked for that is not here."""
        if self._state.decode.window is None or self._asked is None:
            return
        if pieces is None or self._asked == 0:
            rid = self.rid
            self._asked = pieces
            self._io.post(lambda core, now_ns: core.want(rid, pieces, now_ns))

    def _next_text(self, timeout_s: float | None) -> str | None:
        """Take what happened next: its text, if any; None: nothing happened in time."""
        self._io.check_process()
        effect = self._inbox.get(timeout_s)
        if effect is None:
            return None
        if isinstance(effect, Output) and self._asked is not None:
            self._asked = max(0, self._asked - 1)
        return self._state.take(effect)


def _not_finished(timeout_s: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(
        "not_finished",
        f"the reply is not complete after {timeout_s} s; wait longer, or cancel() it",
        retryable=True,
        timeout_s=timeout_s,
    )
