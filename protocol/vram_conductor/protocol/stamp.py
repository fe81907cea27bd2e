"""A stamp remembers the content digest of a model file, so that it is hashed once.

It lies beside the file as ``<file>.stamp.json``: ``{dev, inode, size, mtime_ns, sha256}``, and
holds as long as the file's identity does.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from vram_conductor.protocol.split_files import combined_sha256, part_paths

_STAMP_BYTES_MAX = 4096


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a file and the sha256 of its content (64 hex digits)."""

    dev: int
    inode: int
    size: int
    mtime_ns: int
    sha256: str


def stamp_of(stat: os.stat_result, sha256: str) -> Stamp:
    """The stamp of a file whose content has this digest. *Pure.*"""
    return Stamp(
        dev=stat.st_dev,
        inode=stat.st_ino,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        sha256=sha256,
    )


def stamp_path(file: Path) -> Path:
    """``model.gguf`` → ``model.gguf.stamp.json``. *Pure.*"""
    return file.with_name(file.name + ".stamp.json")


def read_stamp(file: Path) -> str | None:
    """The sha256 of ``file`` if a stamp knows it and the file is still the same, else None."""
    try:
        with stamp_path(file).open("rb") as opened:
            data = opened.read(_STAMP_BYTES_MAX)
        stamp = msgspec.json.decode(data, type=Stamp)
        return stamp.sha256 if stamp == stamp_of(file.stat(), stamp.sha256) else None
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def model_stamp(path: Path) -> str | None:
    """The digest of a model in one or several files, from their stamps; None where one has none
    that still holds."""
    digests: list[str] = []
    for part in part_paths(path):
        digest = read_stamp(part)
        if digest is None:
            return None
        digests.append(digest)
    return combined_sha256(digests)


def write_stamp(file: Path, sha256: str, stat: os.stat_result) -> None:
    """Write the stamp atomically. ``stat`` was taken *before* the content was read, so a file
    that changed meanwhile does not match its stamp.

    Raises:
        OSError: the folder is read-only, the disk full …; no partial stamp is left.
    """
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(msgspec.json.encode(stamp_of(stat, sha256)))
        Path(name).replace(stamp_path(file))
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
