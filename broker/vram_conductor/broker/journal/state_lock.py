"""The state folder belongs to one broker at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from vram_conductor.protocol.errors import FailedPrecondition, Unavailable

LOCK_NAME = "broker.lock"


class StateLock:
    """A lock on ``folder``, held until ``release`` or the end of the process, however it ends.

    The folder is created, for its owner only. The lock file holds our pid and stays behind:
    removing it would let two brokers lock two files of one name.

    Raises:
        FailedPrecondition: ``state_dir_in_use``, details ``pid``.
        Unavailable: ``state_dir_unusable``.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = -1
        path = folder / LOCK_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._fd, 20).strip().decode("ascii", "replace")
            self.release()
            pid = int(holder) if holder.isdigit() else None
            raise FailedPrecondition(
                "state_dir_in_use",
                f"{folder} is in use by the broker with pid {pid or 'unknown'}; stop that one, or "
                "give this one another --state-dir",
                path=str(folder),
                pid=pid,
            ) from None
        except OSError as error:
            self.release()
            raise Unavailable(
                "state_dir_unusable",
                f"cannot use {folder} for the journal: {error.strerror}; give another --state-dir",
                path=str(folder),
                errno=error.errno,
            ) from None
        self._write_pid()

    def _write_pid(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, f"{os.getpid()}\n".encode())
        except OSError:  # a full disk: only the message of a second broker is the poorer for it
            return

    def release(self) -> None:
        """Let another broker have the folder. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
