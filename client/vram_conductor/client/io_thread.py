"""The thread that owns a Conductor's socket. Other threads hand it commands and get effects."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import Effect, Failed
from vram_conductor.client.link import Link, Sink
from vram_conductor.protocol.errors import (
    Cancelled,
    ConductorError,
    FailedPrecondition,
    Internal,
)

log: logging.Logger = logging.getLogger("vram_conductor.client")

Command = Callable[[ClientCore, int], Iterable[Effect]]
"""Runs in the IO thread with the core and the time."""


class IoThread:
    """Runs a :class:`Link` until :meth:`stop`.

    Nothing in here takes a lock that a garbage collection could find taken: :meth:`post` may be
    called from ``__del__``.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._pid = os.getpid()
        self._commands: deque[Command] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._awake = False
        self._stopping = False
        self._ended: ConductorError | None = None
        self._thread = threading.Thread(target=self._run, name="conductor-io", daemon=True)
        self._thread.start()

    @property
    def inherited(self) -> bool:
        """This is a fork's copy: the thread is in the parent, the socket is the parent's."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise in a forked child, where waiting would never end.

        Raises:
            FailedPrecondition: ``forked``.
        """
        if self.inherited:
            raise FailedPrecondition(
                "forked",
                f"this Conductor belongs to process {self._pid}, not to its fork "
                f"{os.getpid()}; make a new Conductor after the fork",
                owner_pid=self._pid,
                pid=os.getpid(),
            )

    def submit(self, key: bytes, sink: Sink, command: Command) -> None:
        """Run ``command``; what happens to the request ``key`` goes to ``sink``."""
        self.check_process()
        self._link.sinks[key] = sink
        self.post(command)
        if self._ended is not None:
            self._fail_sinks(self._ended)

    def post(self, command: Command) -> None:
        """Run ``command`` in the IO thread, soon."""
        self._commands.append(command)
        if not self._awake:
            self._awake = True
            with contextlib.suppress(OSError):
                self._wake_in.send(b"\0")

    def drop(self, key: bytes) -> None:
        """Nobody takes what happens to the request ``key`` any more."""
        self._link.sinks.pop(key, None)

    def stop(self) -> None:
        """Say BYE, end the thread, close the socket. Idempotent; nothing in a fork."""
        if self.inherited:
            return
        self._stopping = True
        self.post(lambda core, now_ns: ())
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        ended: ConductorError = Cancelled("closed", "this Conductor is closed; make a new one")
        try:
            while not self._stopping:
                self._wait()
                self._run_commands()
                self._link.pump()
            self._run_commands()
            self._link.close()
        except Exception as error:
            log.exception("the client's IO thread failed")
            self._link.abort()
            ended = Internal(
                "client_failed",
                f"the client's IO thread failed: {error!r}; close this Conductor, make a new "
                "one and report the log",
            )
        self._ended = ended
        self._fail_sinks(ended)
        self._wake_in.close()
        self._wake_out.close()

    def _wait(self) -> None:
        """Until there is something to do; wakes up early without harm."""
        link = self._link
        poller = zmq.Poller()
        poller.register(self._wake_out.fileno(), zmq.POLLIN)
        for index, part in enumerate(link.pollable):
            both = index == 0 and link.blocked
            poller.register(part, zmq.POLLIN | zmq.POLLOUT if both else zmq.POLLIN)
        due_ns = link.next_ns()
        # Rounded up, or the last millisecond would be a busy loop.
        wait_ms = None if due_ns is None else max(0, -(-(due_ns - time.monotonic_ns()) // 10**6))
        poller.poll(wait_ms)

    def _run_commands(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(4096)
        self._awake = False
        while self._commands:
            command = self._commands.popleft()
            self._link.perform(command(self._link.core, time.monotonic_ns()))

    def _fail_sinks(self, error: ConductorError) -> None:
        sinks = self._link.sinks
        while sinks:
            with contextlib.suppress(KeyError):
                key, sink = sinks.popitem()
                sink(Failed(key, error))
