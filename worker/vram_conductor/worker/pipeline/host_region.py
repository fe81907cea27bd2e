"""Host memory whose pages are there: for what is large, and is pinned or filled at once.

The kernel clears a page when it is first touched, and pinning touches all of them with one thread:
tens of gigabytes take many seconds. Several threads and huge pages take a fraction of that.
"""

from __future__ import annotations

import contextlib
import mmap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.memory import host_memory

THREADS = 8
_MARGIN_BYTES = 256 << 20
"""Left to everybody else: who takes the last page is killed, not refused."""


def host_region(n_bytes: int) -> NDArray[np.uint8]:
    """``n_bytes`` zeros at a page boundary; unmapped when the last view is gone.

    Raises:
        ResourceExhausted: ``host_memory_short``.
    """
    available_bytes = host_memory().available_bytes
    if n_bytes + _MARGIN_BYTES > available_bytes:
        raise _short(n_bytes, available_bytes)
    whole_bytes = max(1, -(-n_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
    try:
        mapping = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise _short(n_bytes, available_bytes) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A wish: kernels without huge pages refuse it.
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    _touch(array)
    return array[:n_bytes]


def _touch(array: NDArray[np.uint8]) -> None:
    pages = array[:: mmap.PAGESIZE]
    with ThreadPoolExecutor(THREADS) as pool:
        # NumPy lets other threads run while it writes.
        list(pool.map(_clear, np.array_split(pages, THREADS)))


def _clear(part: NDArray[np.uint8]) -> None:
    part.fill(0)


def _short(n_bytes: int, available_bytes: int) -> ResourceExhausted:
    return ResourceExhausted(
        "host_memory_short",
        f"{n_bytes} bytes of host memory are needed for what is streamed, and {available_bytes} "
        "are available: end other programs, or take a smaller model",
        need_bytes=n_bytes,
        available_bytes=available_bytes,
    )
