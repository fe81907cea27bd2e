"""One line on a terminal's stderr that is drawn over and over; nothing where there is none."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from vram_conductor.client.text import duration, shorten

PERIOD_S = 0.1
_FIRST_S = 0.3
"""What is over by then is not worth a line."""


class LiveLine:
    """Draws and removes the line. Thread-safe; the owner of stderr clears it before writing."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[object] = threading.RLock()
        self._shown = False
        self._drawn_s = 0.0

    @property
    def possible(self) -> bool:
        """Whether anybody would see it."""
        return sys.stderr.isatty()

    def draw(self, text: str, *, last: bool = False) -> None:
        """Show ``text`` instead of what is there. Too soon after the one before it is left out,
        unless it is the ``last``."""
        now_s = time.monotonic()
        if not self.possible or (not last and now_s - self._drawn_s < PERIOD_S):
            return
        # Asked each time: the window may have been made smaller.
        width = shutil.get_terminal_size((80, 24)).columns
        with self.lock:
            self._drawn_s, self._shown = now_s, True
            sys.stderr.write(f"\r{shorten(text, width - 1)}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line, so that something else can be written there."""
        with self.lock:
            if self._shown:
                self._shown = False
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()


class Waiting:
    """Shows what is being waited for, and for how long already, until the block is left.

    Attributes:
        now: what is being done; may be changed at any time.
    """

    def __init__(self, line: LiveLine, now: str) -> None:
        self.now = now
        self._line = line
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._line.possible:
            self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._line.clear()

    def _run(self) -> None:
        began_s = time.monotonic()
        delay_s = _FIRST_S
        while not self._over.wait(delay_s):
            self._line.draw(f"{self.now} … {duration(1000 * (time.monotonic() - began_s))}")
            delay_s = PERIOD_S
