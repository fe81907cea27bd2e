"""The sizes in llama.cpp's log lines. *Pure*.

llama.cpp tells the sizes of its buffers in log lines only, printed in MiB with two decimals, so
each is known to half of 0.01 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
    found: list[BufferLine] = []
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
    found: list[CacheLine] = []
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
