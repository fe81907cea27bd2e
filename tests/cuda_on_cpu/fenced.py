"""Host memory between pages that nobody may touch: what reads or writes outside it is caught."""

from __future__ import annotations

import ctypes
import mmap
import os

ALIGNMENT = 256
"""Of the first byte, and of the first byte that may not be touched."""

POISON = 0xFF
"""Every byte at first: a NaN of each float format."""

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FencedMemory:
    """``n_bytes`` from ``address`` on, and what the alignment adds to them."""

    def __init__(self, n_bytes: int) -> None:
        aligned = max(-(-n_bytes // ALIGNMENT), 1) * ALIGNMENT
        inside = -(-aligned // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = inside + 2 * mmap.PAGESIZE
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._start: int = _libc.mmap(None, self._size, readable, flags, -1, 0)
        fences = self._start, self._start + self._size - mmap.PAGESIZE
        # Flush with the fence behind it: that is the side on which too much is read.
        self.address = fences[1] - aligned
        ctypes.memset(fences[0], POISON, self._size)
        for fence in fences:
            if _libc.mprotect(fence, mmap.PAGESIZE, _PROT_NONE):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def free(self) -> None:
        """From now on nobody may touch any of it."""
        _libc.munmap(self._start, self._size)
