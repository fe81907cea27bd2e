"""Threads that stay: a new one for every wake would cost it a few tenths of a millisecond."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Work = Callable[[], None]


class Waker:
    """One thread that does one thing at a time."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A daemon: one that hangs must not keep the process.
        threading.Thread(target=self._loop, name="waker", daemon=True).start()

    def begin(self, work: Work) -> None:
        """Do it; it must not raise."""
        self._work.put(work)

    def wait(self) -> None:
        """Until it is done."""
        self._done.get()

    def _loop(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            finally:
                # Nothing of it may live on until the next one comes: it holds a model.
                del work
                self._done.put(None)


class Wakers:
    """As many as were ever needed at once."""

    def __init__(self) -> None:
        self._idle: list[Waker] = []
        self._busy: list[Waker] = []

    def begin(self, work: Work) -> None:
        """Do it beside everything else; it must not raise."""
        waker = self._idle.pop() if self._idle else Waker()
        self._busy.append(waker)
        waker.begin(work)

    def join(self) -> None:
        """Wait for all that was begun."""
        while self._busy:
            self._busy[-1].wait()
            self._idle.append(self._busy.pop())
