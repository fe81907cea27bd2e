"""One ``conductor up`` per state folder; the second one is told about the first."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vram_conductor.protocol.errors import AlreadyExists, Unavailable

LOCK_NAME = "up.lock"


class UpLock:
    """Held until :meth:`release` or the end of the process, however it ends. The file has our pid
    and stays behind: removing it would let two processes lock two files of one name.

    Raises:
        AlreadyExists: ``already_up``, details ``pid``.
        Unavailable: ``state_dir_unusable``.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Unavailable(
                "state_dir_unusable",
                f"cannot use {folder}: {error.strerror}; set broker.state_dir to another folder",
                path=str(folder),
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 20).strip().decode("ascii", "replace")
            self.release()
            raise AlreadyExists(
                "already_up",
                f"one is up already, with pid {holder or 'unknown'}: look at it with "
                f"`conductor status`, stop it with Ctrl-C there or `kill {holder or 'PID'}`; for "
                "a second one set another broker.state_dir and broker.runtime_dir (and, where they "
                "are set, other clients, workers, metrics_port and arena_dir)",
                pid=int(holder) if holder.isdigit() else None,
                path=str(path),
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another one in. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
