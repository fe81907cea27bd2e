"""The folder of one device's arenas: private, locked, addressed through one descriptor.

``<arena_dir>/<device>/<digest of the conversation key>.kv``. Both folders belong to this user and
have mode 0700; every file is opened relative to the folder's descriptor and never through a link,
so nobody can slip another file in. An exclusive lock keeps two workers off the same states.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import stat
import time
from pathlib import Path
from urllib.parse import quote

import msgspec

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
)
from vram_conductor.protocol.values import ConversationKey

log = logging.getLogger(__name__)

_OWN_NAME = re.compile(r"[0-9a-f]{32}\.kv(\.new)?")
_LOCK_NAME = "lock"
_LOCK_POLL_S = 0.05
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def arena_name(key: ConversationKey) -> str:
    """File name of a conversation's arena. *Pure.*"""
    packed = msgspec.msgpack.encode(key)
    return hashlib.blake2b(packed, digest_size=16).hexdigest() + ".kv"


def new_name(name: str) -> str:
    """Name of an arena that will replace ``name``. *Pure.*"""
    return name + ".new"


class ArenaDir:
    """An open, locked arena folder.

    Attributes:
        path: where it is.
        fd: its descriptor.
    """

    def __init__(self, arena_dir: Path, device: str, patience_s: float = 0.0) -> None:
        """Create the folders where they are missing, check them, take the lock (waiting for it
        for ``patience_s``).

        Raises:
            PermissionDenied: ``arena_dir_unsafe``: a link, another owner, open to others.
            FailedPrecondition: ``arena_in_use``: another worker has it; ``arena_dir_missing``.
            ResourceExhausted: ``disk_full``.
        """
        outer = _private_folder(arena_dir)
        os.close(outer)
        self.path = arena_dir / f"device-{quote(device, safe='')}"
        self.fd = _private_folder(self.path)
        try:
            self._lock_fd = self._lock(device, patience_s)
        except BaseException:
            os.close(self.fd)
            raise

    def _lock(self, device: str, patience_s: float) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(_LOCK_NAME, flags, 0o600, dir_fd=self.fd)
        except OSError as error:
            raise ResourceExhausted(
                "disk_full", f"cannot write in {self.path}: {error.strerror}"
            ) from None
        if not _locked(fd, 0.0) and not self._wait(fd, device, patience_s):
            holder = _holder(fd)
            os.close(fd)
            raise FailedPrecondition(
                "arena_in_use",
                f"another worker (pid {holder or 'unknown'}) keeps parked states of {device} in "
                f"{self.path}; stop it, or set another broker.runtime_dir or worker.arena_dir",
                pid=holder,
                alive=holder.isdigit() and _alive(int(holder)),
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        return fd

    def _wait(self, fd: int, device: str, patience_s: float) -> bool:
        """Whether the lock is ours after all."""
        if not patience_s:
            return False
        log.info(
            "another worker (pid %s) has the parked states of %s in %s; waiting for them, up to "
            "%.0f s",
            _holder(fd) or "unknown",
            device,
            self.path,
            patience_s,
        )
        return _locked(fd, patience_s)

    def names(self) -> list[str]:
        """Names of arena files, oldest first; files that are not ours are not listed."""
        found: list[tuple[int, str]] = []
        with os.scandir(self.fd) as entries:
            for entry in entries:
                if not _OWN_NAME.fullmatch(entry.name):
                    continue
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid():
                    found.append((info.st_mtime_ns, entry.name))
        return [name for _, name in sorted(found)]

    def remove(self, name: str) -> None:
        """Delete a file. Idempotent."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return

    def rename(self, old: str, new: str) -> None:
        """Atomically replace ``new`` by ``old``."""
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def close(self) -> None:
        """Release the lock. The files stay. Idempotent."""
        if self.fd >= 0:
            os.close(self._lock_fd)
            os.close(self.fd)
            self.fd = -1


def _alive(pid: int) -> bool:
    """Whether it is there for us to see: a holder in another container is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _holder(fd: int) -> str:
    """What is written in the lock: the holder's pid, in digits."""
    return os.pread(fd, 32, 0).decode("ascii", "replace").strip()


def _locked(fd: int, patience_s: float) -> bool:
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOCK_POLL_S)


def _private_folder(path: Path) -> int:
    """Make and open a folder that only this user can enter; returns its descriptor."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, _FOLDER_FLAGS)
    except FileExistsError:
        raise _unsafe(path, "it is not a folder") from None
    except FileNotFoundError:
        raise FailedPrecondition(
            "arena_dir_missing",
            f"the folder above {path} does not exist; set worker.arena_dir to a folder in shared "
            "memory or on a fast disk",
        ) from None
    except OSError as error:
        if path.is_symlink():
            raise _unsafe(path, "it is a symbolic link") from None
        raise ResourceExhausted("disk_full", f"cannot make {path}: {error.strerror}") from None
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        os.close(fd)
        raise _unsafe(path, f"it belongs to user {info.st_uid}")
    if info.st_mode & 0o077:
        os.close(fd)
        raise _unsafe(path, f"others may enter it (mode {info.st_mode & 0o777:o}); chmod 700 it")
    return fd


def _unsafe(path: Path, why: str) -> PermissionDenied:
    return PermissionDenied(
        "arena_dir_unsafe", f"parked states may not be kept in {path}: {why}", path=str(path)
    )
