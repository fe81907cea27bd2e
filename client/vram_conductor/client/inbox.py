"""What happened to one request, for the threads that wait for it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from vram_conductor.client.effects import RequestEffect

SLICE_S = 0.5
"""A signal that arrives just before the main thread blocks does not wake it (CPython checks for
signals, then waits on a lock), so no wait is longer than this: Ctrl-C always works."""


class Inbox:
    """Filled by the IO thread, emptied by any other. Safe to fill from ``__del__``."""

    def __init__(self) -> None:
        self._effects: queue.SimpleQueue[RequestEffect] = queue.SimpleQueue()
        self.put: Callable[[RequestEffect], None] = self._effects.put

    def get(self, timeout_s: float | None = None) -> RequestEffect | None:
        """The next effect; None if there is none within ``timeout_s`` seconds."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = SLICE_S if until is None else min(SLICE_S, until - time.monotonic())
            try:
                return self._effects.get(timeout=max(0.0, left_s))
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return None
