"""File operations that the journal needs: complete writes, durable names, whole snapshots."""

from __future__ import annotations

import os
from pathlib import Path

from vram_conductor.broker.journal import format as journal_format
from vram_conductor.broker.journal import replay
from vram_conductor.broker.journal.restored import Restored

NEW_SUFFIX = ".new"
"""A snapshot that has not replaced the journal yet; worthless after a crash."""


def write_all(fd: int, data: bytes) -> int:
    """Write everything, however often the system takes only a part; returns the length."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, data[done:])
    return done


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_snapshot(target: Path, restored: Restored) -> tuple[int, int]:
    """Write the shortest journal with this state to ``target`` and force it to the disk.

    Returns:
        A descriptor opened for appending, and the length in bytes.

    Raises:
        OSError: nothing stays behind.
    """
    fd = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = write_all(fd, journal_format.header())
        for record in restored.records():
            size += write_all(fd, journal_format.frame(replay.encode(record)))
        os.fdatasync(fd)
    except BaseException:
        os.close(fd)
        target.unlink(missing_ok=True)
        raise
    return fd, size
