"""A Link driven by an asyncio event loop.

There is no task that waits in ``recv``: cancelling one can lose a message that was already taken
from the socket. Callbacks on the sockets' file descriptors drain them instead; nobody can cancel
those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import zmq

from vram_conductor.client.effects import Effect, Failed
from vram_conductor.client.link import Link, Sink
from vram_conductor.protocol.errors import Cancelled, ConductorError, FailedPrecondition, Internal

BLOCKED_S = 0.05
"""How often to look whether a socket that took nothing takes something, should no event tell."""


class LoopLink:
    """Runs a :class:`Link` in the running event loop. Use it from that loop only."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._fds: list[int] = []
        self._generation = 0
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended: ConductorError | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def check_loop(self) -> None:
        """Raise where waiting would never end.

        Raises:
            FailedPrecondition: ``wrong_loop``: this is another event loop, or none.
        """
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if not here:
            raise FailedPrecondition(
                "wrong_loop",
                "this AsyncConductor belongs to another event loop; make one per loop, and use "
                "Conductor in threads",
            )

    def submit(self, key: bytes, sink: Sink, request: Callable[[], Iterable[Effect]]) -> None:
        """Hand a request to the core; what happens to it goes to ``sink``."""
        self.check_loop()
        if self._ended is not None:
            sink(Failed(key, self._ended))
            return
        self._link.sinks[key] = sink
        self.perform(request())

    def perform(self, effects: Iterable[Effect]) -> None:
        """Act on effects, then send what there is to send, soon. Nothing after the end."""
        if self._ended is not None:
            return
        self._link.perform(effects)
        self._schedule()

    def drop(self, key: bytes) -> None:
        """Nobody takes what happens to the request ``key`` any more."""
        self._link.sinks.pop(key, None)

    def close(self) -> None:
        """Say BYE, fail what runs, close the socket. Idempotent."""
        if self._ended is None:
            error = Cancelled("closed", "this AsyncConductor is closed; make a new one")
            self._end(error, self._link.close)

    def close_from_anywhere(self) -> None:
        """:meth:`close` for a finalizer: in any thread, and after the loop's end."""
        try:
            self._loop.call_soon_threadsafe(self.close)
        except RuntimeError:
            # The loop is closed; nobody else uses the sockets any more.
            self.close()

    def _end(self, error: ConductorError, close: Callable[[], None]) -> None:
        self._ended = error
        self._unwatch()
        if self._timer is not None:
            self._timer.cancel()
        close()
        while self._link.sinks:
            key, sink = self._link.sinks.popitem()
            sink(Failed(key, error))

    def _schedule(self) -> None:
        if not self._scheduled and self._ended is None:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        if self._ended is not None:
            return
        try:
            more = self._link.pump()
            self._watch()
            # The descriptor signals edges, and sending may have eaten one.
            if more or self._link.readable:
                self._schedule()
            self._set_timer()
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "the client's link failed", "exception": error}
            )
            self._end(
                Internal(
                    "client_failed",
                    f"the client's link failed: {error!r}; close this AsyncConductor, make a "
                    "new one and report the log",
                ),
                self._link.abort,
            )

    def _watch(self) -> None:
        if self._generation == self._link.generation:
            return
        self._unwatch()
        self._generation = self._link.generation
        for part in self._link.pollable:
            fd = int(part.getsockopt(zmq.FD))
            self._loop.add_reader(fd, self._schedule)
            self._fds.append(fd)
        self._schedule()

    def _unwatch(self) -> None:
        for fd in self._fds if not self._loop.is_closed() else ():
            self._loop.remove_reader(fd)
        self._fds.clear()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due_ns = self._link.next_ns()
        wait_s = None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e9)
        if self._link.blocked:
            wait_s = BLOCKED_S if wait_s is None else min(wait_s, BLOCKED_S)
        self._timer = None if wait_s is None else self._loop.call_later(wait_s, self._schedule)
