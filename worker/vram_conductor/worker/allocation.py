"""File space, taken before it is touched and given back by punching holes.

Writing to a mapped page that the file system cannot back is SIGBUS; ``allocate`` turns that into
an error beforehand.
"""

from __future__ import annotations

import ctypes
import errno
import os

from vram_conductor.protocol.errors import ConductorError, Internal, ResourceExhausted

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
_MADV_POPULATE_WRITE = 23  # asm-generic/mman-common.h; Linux 5.14
_KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def allocate(fd: int, offset: int, size: int) -> None:
    """Back ``size`` bytes of a file.

    Raises:
        ResourceExhausted: ``disk_full``.
        Internal: ``arena_io``.
    """
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        raise no_room(error, fd, size) from None


def punch_hole(fd: int, offset: int, size: int) -> bool:
    """Give a range's memory back; it reads as zeros. False where the file system cannot."""
    return bool(_libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, size) == 0)


def populate(address: int, size: int) -> None:
    """Map pages that are allocated already, where the kernel can; they are mapped on first use
    otherwise."""
    _libc.madvise(address, size, _MADV_POPULATE_WRITE)


def no_room(error: OSError, fd: int, need_bytes: int) -> ConductorError:
    """The typed error for a failed write in the file system of ``fd``."""
    if error.errno not in _NO_ROOM:
        return Internal("arena_io", f"parking failed: {error.strerror}")
    info = os.fstatvfs(fd)
    free_bytes = info.f_bavail * info.f_frsize
    return ResourceExhausted(
        "disk_full",
        f"parking a state needs {need_bytes} more bytes, the arena's file system has {free_bytes} "
        "free; enlarge it (a container's /dev/shm: --shm-size), or lower host_cap or n_ctx",
        need_bytes=need_bytes,
        free_bytes=free_bytes,
    )
