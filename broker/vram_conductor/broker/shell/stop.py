"""Why the process should end: a signal, or the supervisor's pipe was closed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Turns signals and the end of a pipe into something that a Poller can wait for.

    Usage: ``with Stop(fd) as stop``: poll ``stop.fds`` for input, then ask ``reasons``. Outside
    the main thread signals are left alone.

    Args:
        supervised_fd: read end of a pipe whose write end the parent holds; None without one.
    """

    def __init__(self, supervised_fd: int | None = None) -> None:
        self._supervised_fd = supervised_fd
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._pending: list[str] = []
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    @property
    def fds(self) -> list[int]:
        """Descriptors to poll."""
        fds = [self._wake_r.fileno()]
        return fds if self._supervised_fd is None else [*fds, self._supervised_fd]

    def request(self, reason: str) -> None:
        """Ask for the end from another thread or a signal handler."""
        self._pending.append(reason)
        self._wake()

    def reasons(self, fd: int) -> list[str]:
        """What came in over ``fd``, one of ``fds``, which has input. Each reason counts once."""
        if fd == self._supervised_fd:
            if os.read(fd, 4096):
                return []
            self._supervised_fd = None
            return ["the supervisor is gone"]
        with contextlib.suppress(BlockingIOError):
            while self._wake_r.recv(4096):
                pass
        taken, self._pending = self._pending, []
        return taken

    def __enter__(self) -> Stop:
        try:
            self._previous_fd = signal.set_wakeup_fd(
                self._wake_w.fileno(), warn_on_full_buffer=False
            )
        except ValueError:  # not the main thread
            return self
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._previous_fd)
        self._wake_r.close()
        self._wake_w.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The wake-up descriptor has already ended the poll.
        self._pending.append(signal.Signals(number).name)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop will wake up anyway
            self._wake_w.send(b"\0")
