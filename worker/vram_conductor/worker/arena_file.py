"""Making and opening the file of an arena, with the checks that keep out what is not ours."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from vram_conductor.protocol.errors import Internal
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.allocation import allocate, no_room

_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def create(dir_fd: int, name: str, half_bytes: int) -> int:
    """Make a file of the right length with an allocated, empty header; returns its descriptor.

    Raises:
        ResourceExhausted: ``disk_full``; no file is left.
        Internal: ``arena_io``.
    """
    try:
        fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd)
    except OSError as error:
        raise no_room(error, dir_fd, fmt.HEADER_BYTES) from None
    try:
        try:
            os.ftruncate(fd, fmt.file_bytes(half_bytes))
        except OSError as error:
            raise no_room(error, fd, fmt.HEADER_BYTES) from None
        allocate(fd, 0, fmt.HEADER_BYTES)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=dir_fd)
        raise
    return fd


def open_existing(dir_fd: int, name: str) -> tuple[int, int]:
    """Open an arena's file; returns its descriptor and ``half_bytes``.

    Raises:
        DataLoss: ``state_corrupt``: damaged, cut off, not ours, not a plain file.
        Internal: ``arena_io``: no descriptor; the file may be fine.
    """
    try:
        fd = os.open(name, _OPEN_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ELOOP}:
            raise fmt.corrupt(f"cannot be opened: {error.strerror}") from None
        raise Internal("arena_io", f"cannot open a parked state: {error}") from error
    try:
        return fd, _checked_half_bytes(fd)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise Internal("arena_io", f"cannot read a parked state: {error}") from error
        raise


def _checked_half_bytes(fd: int) -> int:
    info = os.fstat(fd)
    plain = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
    if not plain or info.st_uid != os.geteuid():
        raise fmt.corrupt("not a plain file of this user")
    if info.st_size < fmt.file_bytes(fmt.PAGE_BYTES):
        raise fmt.corrupt("cut off", file_bytes=info.st_size)
    page = os.pread(fd, fmt.PAGE_BYTES, 0)
    return fmt.check_words(tuple(memoryview(page).cast("Q")), info.st_size)
