"""Log lines of llama.cpp: who said what, and the sizes in them. *Pure*.

llama.cpp tells the sizes of its buffers in log lines only, printed in MiB with two decimals, so
each is known to half of 0.01 MiB. It logs from the thread that called it (its compute threads
print nothing), so lines are told apart by thread.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARN, LEVEL_ERROR, LEVEL_CONT = 1, 2, 3, 4, 5
"""``enum ggml_log_level`` (ggml.h; llama-cpp-python's own logger has an older numbering)."""

LINES_MAX = 4096
"""Lines kept of one capture; a load logs a few hundred."""

ROUNDING_BYTES = (1 << 20) // 200 + 1
"""Largest error of a size that was printed with two decimals of a MiB."""

_MIB = 1 << 20
_SIZE = r"\s+(?P<buffer>\S+)\s+{kind} buffer size\s*=\s*(?P<mib>[\d.]+) MiB"
_PATTERNS = {
    "weights": re.compile(r"load_tensors:" + _SIZE.format(kind="model")),
    "kv": re.compile(r"llama_kv_cache\S*:" + _SIZE.format(kind="KV")),
    "recurrent": re.compile(r"llama_memory_recurrent\S*:" + _SIZE.format(kind="RS")),
    "compute": re.compile(r"sched_reserve:" + _SIZE.format(kind="compute")),
    "output": re.compile(r"llama_context:" + _SIZE.format(kind="output")),
}
_ANY_BUFFER = re.compile(r"buffer size\s*=\s*[\d.]+ MiB")
_CACHE = re.compile(
    r"(?P<cache>llama_kv_cache|llama_memory_recurrent)\S*: size =\s*(?P<mib>[\d.]+) MiB "
    r"\(\s*(?P<cells>\d+) cells,\s*(?P<layers>\d+) layers"
)
_WINDOW_FOLLOWS = re.compile(r"llama_kv_cache_iswa: creating\s+SWA KV cache")


@dataclass(frozen=True)
class BufferLine:
    """One buffer: ``kind`` is weights, kv, recurrent, compute or output; ``buffer`` is the
    backend's buffer name (``CPU``, ``CPU_REPACK``, ``CUDA0``, ``CUDA_Host``); ``bytes`` is the
    printed size, true to :data:`ROUNDING_BYTES`. In a dry run kv and weights print 0.00."""

    kind: str
    buffer: str
    bytes: int


@dataclass(frozen=True)
class CacheLine:
    """The total of one cache, printed in dry runs too: ``kind`` is kv or recurrent; for the
    latter ``cells`` is the number of sequences. ``window``: it keeps a sliding window only."""

    kind: str
    bytes: int
    cells: int
    layers: int
    window: bool = False


def parse_buffers(lines: Iterable[str]) -> list[BufferLine]:
    """Every known buffer in ``lines``."""
    found = []
    for line in lines:
        for kind, pattern in _PATTERNS.items():
            match = pattern.match(line)
            if match:
                found.append(BufferLine(kind, match["buffer"], _bytes(match["mib"])))
                break
    return found


def unknown_buffers(lines: Iterable[str]) -> list[str]:
    """Lines that tell of a buffer which :func:`parse_buffers` does not know: counting on
    without them would promise too little."""
    return [
        line
        for line in lines
        if _ANY_BUFFER.search(line) and not any(p.match(line) for p in _PATTERNS.values())
    ]


def parse_caches(lines: Iterable[str]) -> list[CacheLine]:
    """The totals of every cache in ``lines`` (two for sliding-window and for hybrid models)."""
    found = []
    window = False
    for line in lines:
        if _WINDOW_FOLLOWS.match(line):
            window = True
        match = _CACHE.match(line)
        if match:
            kind = "kv" if match["cache"] == "llama_kv_cache" else "recurrent"
            size, cells, layers = _bytes(match["mib"]), int(match["cells"]), int(match["layers"])
            found.append(CacheLine(kind, size, cells, layers, window))
            window = False
    return found


def _bytes(mib: str) -> int:
    return round(float(mib) * _MIB)


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
