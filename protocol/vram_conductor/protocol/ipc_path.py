"""Sole ownership of an ipc path: a private folder, a lock, a listening socket of our own.

Binding a UNIX socket over a living one succeeds in libzmq and steals its clients in silence, and
a closing socket unlinks the path later, in a thread, even when a successor has bound it since.
So the lock decides who owns the path, and we create and unlink the socket file ourselves
(ZMQ_USE_FD); libzmq only accepts on it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from vram_conductor.protocol.errors import FailedPrecondition, Unavailable

_BACKLOG = 128
_OTHERS = 0o077


class IpcPath:
    """A claimed path; the lock is held until ``release``."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd: int | None = lock_fd
        self._bound = False

    def listen(self) -> int:
        """Create the socket file and listen; the file descriptor then belongs to libzmq.

        Raises:
            OSError: as from bind(2).
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self.path))
            self._bound = True
            self.path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener.detach()

    def unlink(self) -> None:
        """Remove the socket file: new clients see nobody. Idempotent."""
        if self._bound:
            self._bound = False
            with suppress(FileNotFoundError):
                self.path.unlink()

    def release(self) -> None:
        """Give the path to whoever comes next. Idempotent.

        The lock file stays: removing it would let two processes lock two files of one name.
        """
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def claim_ipc(path: str) -> IpcPath:
    """Make ``path`` ours: private folder, lock, no stale socket file in the way.

    Raises:
        FailedPrecondition: ``endpoint_in_use`` (another process holds it; details ``pid``),
            ``unsafe_directory``, ``path_occupied`` (something else is there; it is not deleted).
        Unavailable: ``bind_failed``: the folder or lock file cannot be made.
    """
    target = Path(path)
    try:
        private_folder(target.parent)
        claimed = IpcPath(target, _lock(target))
    except OSError as error:
        raise Unavailable(
            "bind_failed",
            f"cannot prepare {path}: {error.strerror}; set runtime_dir to a folder of yours",
            path=path,
            errno=error.errno,
        ) from None
    try:
        _remove_stale(target)
    except FailedPrecondition:
        claimed.release()
        raise
    return claimed


def private_folder(folder: Path, who: str = "an ipc socket needs") -> None:
    """Create ``folder`` for its owner only, or make sure that it is so. ``who``: what needs it,
    for the message.

    Raises:
        FailedPrecondition: ``unsafe_directory``.
        OSError: it cannot be created.
    """
    if not folder.parent.exists():
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(who, folder, "it is no folder")
    if found.st_uid != os.getuid():
        raise _unsafe(who, folder, f"it belongs to user {found.st_uid}")
    if found.st_mode & stat.S_IWOTH:
        raise _unsafe(who, folder, "it is shared; use a folder below it")
    if found.st_mode & _OTHERS:
        raise _unsafe(who, folder, f"its mode is {stat.S_IMODE(found.st_mode):o}; chmod it to 700")


def _unsafe(who: str, folder: Path, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        "unsafe_directory",
        f"{who} a folder that only you can enter; {folder}: {why} (or configure another one)",
        path=str(folder),
    )


def _lock(target: Path) -> int:
    lock = target.with_name(target.name + ".lock")
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 20).strip().decode("ascii", "replace")
        os.close(fd)
        pid = int(holder) if holder.isdigit() else None
        raise FailedPrecondition(
            "endpoint_in_use",
            f"ipc://{target} is in use by process {pid or 'unknown'}; stop it, or set another "
            "runtime_dir for a second broker",
            endpoint=f"ipc://{target}",
            pid=pid,
        ) from None
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def _remove_stale(target: Path) -> None:
    """Under the lock, a socket file that is still there belongs to a dead process."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FailedPrecondition(
            "path_occupied",
            f"{target} exists and is no socket; move it away or choose another path",
            path=str(target),
        )
    target.unlink()
