"""Keys on the disk: a key file, and the folder with the broker's key and the list of all keys.

Every file is its owner's alone (0600), the broker's folder too (0700): whoever could read a secret
half could be that principal, and whoever could write the list could make keys. Changes are
serialised by a lock and are there as a whole or not at all, so that a broker may read at any time.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from vram_conductor.protocol.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from vram_conductor.protocol.ipc_path import private_folder
from vram_conductor.protocol.keys import Key, KeyFile, KeyList, KeyPair

KEY_FILE_BYTES_MAX = 1 << 22
"""More is no file of ours: a list of thousands of keys is smaller."""

T = TypeVar("T", bound=msgspec.Struct)


def new_pair() -> KeyPair:
    """A fresh key pair.

    Raises:
        FailedPrecondition: ``no_curve``: this libzmq was built without CURVE.
    """
    check_curve()
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def check_curve() -> None:
    """Raises FailedPrecondition ``no_curve`` where libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise FailedPrecondition(
            "no_curve",
            "this build of libzmq has no CURVE, so there can be no keys; install the wheel of "
            "pyzmq, or stay on ipc and loopback",
        )


def load_key(path: Path) -> KeyFile:
    """What a client or worker proves itself with.

    Raises:
        NotFound: ``no_key_file``.
        FailedPrecondition: ``unsafe_key_file``: others can read or change it; ``no_curve``.
        InvalidArgument: ``bad_key_file``.
    """
    check_curve()
    key = _read(path, KeyFile)
    _check_pair(path, key.public, key.secret)
    return key


def save_key(path: Path, key: KeyFile) -> None:
    """Write a new key file, for its owner only.

    Raises:
        AlreadyExists: ``key_file_exists``: nothing is overwritten.
        Unavailable: ``keys_unusable``.
    """
    text = msgspec.json.format(msgspec.json.encode(key), indent=2) + b"\n"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text)
    except FileExistsError:
        raise AlreadyExists(
            "key_file_exists",
            f"{path} is there already; move it away, or choose another file with --out",
            path=str(path),
        ) from None
    except OSError as error:
        raise _unusable(path, error) from None


class KeyFolder:
    """The broker's folder of keys. Nothing is opened or made before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.list_path: Path = path / "keys.json"
        self._pair_path = path / "broker.key"

    @property
    def exists(self) -> bool:
        """Whether a key was ever made here."""
        return self.list_path.exists() or self._pair_path.exists()

    def stamp(self) -> tuple[int, int, int]:
        """Another one after every change of the list.

        Raises:
            NotFound: ``no_key_file``. FailedPrecondition: ``unsafe_key_file``.
        """
        info = _private(self.list_path)
        return info.st_ino, info.st_mtime_ns, info.st_size

    def read(self) -> KeyList:
        """The list.

        Raises:
            NotFound: ``no_key_file``. FailedPrecondition: ``unsafe_key_file``,
            ``unsafe_directory``. InvalidArgument: ``bad_key_file``.
        """
        private_folder(self.path, "keys need")
        return _read(self.list_path, KeyList)

    def pair(self) -> KeyPair:
        """The broker's own key. Raises as :meth:`read`."""
        pair = _read(self._pair_path, KeyPair)
        _check_pair(self._pair_path, pair.public, pair.secret)
        return pair

    def prepare(self) -> KeyPair:
        """Make what is missing: folder, the broker's key, an empty list. Returns the key.

        Raises:
            FailedPrecondition: ``unsafe_directory``, ``unsafe_key_file``, ``no_curve``.
            Unavailable: ``keys_unusable``.
        """
        with self._locked():
            if not self._pair_path.exists():
                _write(self._pair_path, new_pair())
            if not self.list_path.exists():
                _write(self.list_path, KeyList())
            return self.pair()

    def add(self, key: Key) -> None:
        """Add a key. Raises AlreadyExists ``key_exists``, and as :meth:`read`."""
        self._change(lambda keys: keys.with_key(key))

    def revoke(self, name: str, now: str) -> tuple[KeyList, KeyList]:
        """Revoke a key; the list before and after. Raises NotFound ``no_such_key``, and as
        :meth:`read`."""
        return self._change(lambda keys: keys.without(name, now))

    def _change(self, change: Callable[[KeyList], KeyList]) -> tuple[KeyList, KeyList]:
        with self._locked():
            before = self.read()
            after = change(before)
            _write(self.list_path, after)
            return before, after

    @contextmanager
    def _locked(self) -> Generator[None]:
        try:
            private_folder(self.path, "keys need")
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(self.path, error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _read(path: Path, kind: type[T]) -> T:
    _private(path)
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(KEY_FILE_BYTES_MAX), type=kind)
    except OSError as error:
        raise InvalidArgument(
            "bad_key_file", f"cannot read {path}: {error.strerror}", path=str(path)
        ) from None
    except msgspec.MsgspecError as error:
        # msgspec quotes no values, so no secret can be in its words.
        raise InvalidArgument(
            "bad_key_file",
            f"{path} is no key file of this kind: {error}; make one with conductor keys new",
            path=str(path),
        ) from None


def _private(path: Path) -> os.stat_result:
    """The file's state, if it is there and its owner's only.

    Raises:
        NotFound: ``no_key_file``. FailedPrecondition: ``unsafe_key_file``.
    """
    try:
        info = path.stat()
    except OSError as error:
        raise NotFound(
            "no_key_file",
            f"there is no key file {path} ({error.strerror}); name the right one, or make one on "
            "the broker's host: conductor keys new NAME",
            path=str(path),
        ) from None
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.getuid():
        why, cure = f"it belongs to user {info.st_uid}", f"copy it as the user {os.getuid()}"
    elif not stat.S_ISREG(info.st_mode):
        why, cure = "it is no file", "name another"
    elif mode & 0o077:
        why, cure = f"its mode is {mode:o}", f"chmod 600 {path}"
    else:
        return info
    raise FailedPrecondition(
        "unsafe_key_file",
        f"others than its owner could use {path}: {why}; {cure} (if somebody may have read it, "
        "revoke the key and make a new one)",
        path=str(path),
        mode=f"{mode:o}",
    )


def _check_pair(path: Path, public: str, secret: str) -> None:
    if zmq.curve_public(secret.encode()) != public.encode():
        raise InvalidArgument(
            "bad_key_file",
            f"the two halves in {path} do not belong together; get the file again",
            path=str(path),
        )


def _write(path: Path, value: msgspec.Struct) -> None:
    """Replace a file of the folder, as a whole."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    try:
        fd, part = tempfile.mkstemp(dir=path.parent)  # mode 0600
        with os.fdopen(fd, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        Path(part).replace(path)
    except OSError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        "keys_unusable",
        f"cannot write {path}: {error.strerror}; set broker.keys_dir, or --out for a key file",
        path=str(path),
        errno=error.errno,
    )
