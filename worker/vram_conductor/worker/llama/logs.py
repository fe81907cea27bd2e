"""llama.cpp's log: who said what.

llama.cpp logs from the thread that called it (its compute threads print nothing), so lines are
told apart by thread.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from dataclasses import dataclass, field

LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARN, LEVEL_ERROR, LEVEL_CONT = 1, 2, 3, 4, 5
"""``enum ggml_log_level`` (ggml.h; llama-cpp-python's own logger has an older numbering)."""

LINES_MAX = 4096
"""Lines kept of one capture; a load logs a few hundred."""


@dataclass
class Capture:
    """What one thread's calls logged while a :meth:`LogRouter.capture` was open."""

    lines: list[tuple[int, str]] = field(default_factory=list)

    def texts(self) -> list[str]:
        return [text for _, text in self.lines]

    def problem(self) -> str:
        """The first error (else warning) line, without the function's name; may be empty.
        The first names the cause, later ones only say that the caller gave up."""
        for level in (LEVEL_ERROR, LEVEL_WARN):
            for seen, text in self.lines:
                if seen == level and text:
                    return " ".join(re.sub(r"^\w+: ", "", text).split())
        return ""


class LogRouter:
    """Takes every log event and hands its line to the capture of the thread that logged it.

    Events may come from any thread. A line may come in pieces: all but the first have level
    CONT, and a newline ends it.
    """

    def __init__(self, recent_max: int = 64) -> None:
        self._captures: dict[int, Capture] = {}
        self._partial: dict[int, tuple[int, str]] = {}
        self.recent: deque[str] = deque(maxlen=recent_max)
        """Last warnings and errors of any thread, for post-mortems."""

    def event(self, level: int, text: str) -> None:
        """One callback from llama.cpp."""
        thread = threading.get_ident()
        if level == LEVEL_CONT:
            level, head = self._partial.pop(thread, (LEVEL_DEBUG, ""))
        else:
            unfinished = self._partial.pop(thread, None)
            if unfinished:
                self._line(thread, *unfinished)
            head = ""
        whole = head + text
        if whole.endswith("\n"):
            self._line(thread, level, whole.rstrip())
        else:
            self._partial[thread] = (level, whole)

    def _line(self, thread: int, level: int, text: str) -> None:
        if level in (LEVEL_WARN, LEVEL_ERROR):
            self.recent.append(text)
        capture = self._captures.get(thread)
        if capture is not None and len(capture.lines) < LINES_MAX:
            capture.lines.append((level, text))

    def capture(self) -> Scope:
        """``with router.capture() as capture``: collect this thread's lines meanwhile. An inner
        scope takes them from the outer one."""
        return Scope(self._captures)


class Scope:
    """See :meth:`LogRouter.capture`. Entered at every decode, hence no generator."""

    __slots__ = ("_captures", "_outer", "_thread")

    def __init__(self, captures: dict[int, Capture]) -> None:
        self._captures = captures

    def __enter__(self) -> Capture:
        self._thread = threading.get_ident()
        self._outer = self._captures.get(self._thread)
        capture = self._captures[self._thread] = Capture()
        return capture

    def __exit__(self, *_error: object) -> None:
        if self._outer is None:
            del self._captures[self._thread]
        else:
            self._captures[self._thread] = self._outer
