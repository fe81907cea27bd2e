"""The reply to one DECODE, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import Output, Queued, RequestEffect
from vram_conductor.client.loop_link import LoopLink
from vram_conductor.client.reply import ReplyState, Result, refill
from vram_conductor.protocol.messages import Decode
from vram_conductor.protocol.values import Usage


class AsyncReply(AsyncIterator[str]):
    """A running reply: ``async for`` over it gives pieces of text, :meth:`result` all of it.

    Leaving it as a context manager before its end cancels the job; so does forgetting it, and so
    does cancelling the task that waits for it (unless ``detach=True``).

    >>> async def main():
    ...     async with AsyncConductor() as conductor:
    ...         async with conductor.agent("coder").chat("Count to three.") as reply:
    ...             async for piece in reply:
    ...                 print(piece, end="|")
    ...         print()
    ...         print((await reply.result()).usage.generated_tokens)
    >>> asyncio.run(main())
    one|, two|, three.|
    3
    """

    def __init__(
        self, link: LoopLink, core: ClientCore, decode: Decode, answer_ms: int, owner: object
    ) -> None:
        self._state = ReplyState(decode)
        self._link = link
        self._core = core
        # Keeps the AsyncConductor open while somebody reads.
        self._owner = owner
        self._inbox: asyncio.Queue[RequestEffect] = asyncio.Queue()
        self._lock = asyncio.Lock()
        self._asked: int | None = 0
        link.submit(
            decode.rid,
            self._inbox.put_nowait,
            lambda: core.decode(decode, answer_ms, time.monotonic_ns()),
        )

    @property
    def rid(self) -> bytes:
        """The job's id, 16 bytes."""
        return self._state.rid

    @property
    def text(self) -> str:
        """The text that was read so far."""
        return self._state.text

    @property
    def ids(self) -> list[int]:
        """The token ids that were read so far, with ``return_ids=True``."""
        return list(self._state.ids)

    @property
    def usage(self) -> Usage | None:
        """The receipt; None before the end was read."""
        return self._state.usage

    @property
    def queued(self) -> Queued | None:
        """The broker's confirmation, with ``position`` in the queue and ``est_ms``; None before
        it was read."""
        return self._state.queued

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """The next piece of text, as soon as it is there.

        Raises:
            StopAsyncIteration: the reply is complete.
            ConductorError: the job failed; :attr:`text` has what came before.
        """
        while (text := await self._step(refill(self._state.decode.window or 1))) is not None:
            if text:
                return text
        self._state.result()
        raise StopAsyncIteration

    async def result(self) -> Result:
        """Wait for the end; the whole reply.

        Raises:
            ConductorError: the job failed; :attr:`text` has what came before.
        """
        while await self._step(None) is not None:
            pass
        return self._state.result()

    def cancel(self) -> None:
        """End the job within one decode step. Does not wait; :meth:`result` then has what came
        before, with ``stop_reason="cancelled"``. Idempotent, harmless after the end."""
        if not self._state.over:
            self._link.check_loop()
            self._link.perform(self._core.cancel(self.rid, time.monotonic_ns()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._state.decode.detach:
            self.cancel()

    def __del__(self) -> None:
        # __init__ may have failed half-way, and any thread may collect garbage.
        link: LoopLink | None = getattr(self, "_link", None)
        if link is not None and not self._state.over:
            with contextlib.suppress(RuntimeError):
                link.loop.call_soon_threadsafe(
                    _abandon, link, self._core, self.rid, self._state.decode.detach
                )

    async def _step(self, pieces: int | None) -> str | None:
        """Wait for one effect and take it: its text; None: the reply is over."""
        self._link.check_loop()
        try:
            async with self._lock:
                if self._state.over:
                    return None
                self._ask(pieces)
                effect = await self._inbox.get()
                if isinstance(effect, Output) and self._asked is not None:
                    self._asked = max(0, self._asked - 1)
                return self._state.take(effect)
        except asyncio.CancelledError:
            if not self._state.decode.detach:
                self.cancel()
            raise

    def _ask(self, pieces: int | None) -> None:
        """With a window: let so many pieces in, if nothing was asked for that is not here."""
        if self._state.decode.window is None or self._asked is None:
            return
        if pieces is None or self._asked == 0:
            self._asked = pieces
            self._link.perform(self._core.want(self.rid, pieces, time.monotonic_ns()))


def _abandon(link: LoopLink, core: ClientCore, rid: bytes, detach: bool) -> None:
    link.drop(rid)
    now_ns = time.monotonic_ns()
    link.perform(core.want(rid, None, now_ns) if detach else core.cancel(rid, now_ns))
