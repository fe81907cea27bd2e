"""The files of the catalogue's models: where they lie, and whether they are what it says.

A model is one file or, where it is split, several; each has a stamp of its own. Errors are those of
``vram_conductor.protocol.errors``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.text import size
from vram_conductor.protocol.catalogue import CatalogueModel, HubSource, PathSource
from vram_conductor.protocol.errors import (
    DataLoss,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from vram_conductor.protocol.split_files import combined_sha256, part_paths
from vram_conductor.protocol.stamp import read_stamp, write_stamp

CHUNK_BYTES = 1 << 20

_MAGIC = b"GGUF"

Say = Callable[[str], None]
"""Told what a user should know while it happens."""

Progress = Callable[[str, int, int], None]
"""``progress(stage, done_bytes, total_bytes)``; stages: ``fetched`` (total 0: not known),
``unpacked``, ``verified``."""


@dataclass(frozen=True)
class ModelFile:
    """One file of a model, and what it must be: sha256 and bytes, ``""`` and 0: not known."""

    path: Path
    sha256: str
    size: int


def model_files(entry: CatalogueModel, path: Path) -> Sequence[ModelFile]:
    """The files of ``entry``, of which ``path`` is the first. *Pure.*"""
    paths = part_paths(path)
    if isinstance(entry.source, HubSource):
        pairs = zip(paths, entry.source.files, strict=True)
        return [ModelFile(path, file.sha256, file.size) for path, file in pairs]
    if len(paths) == 1:
        return [ModelFile(path, entry.sha256, entry.size)]
    return [ModelFile(path, "", 0) for path in paths]


def here(entry: CatalogueModel, path: Path) -> bool:
    """Whether all files of ``entry`` are there."""
    return all(file.path.exists() for file in model_files(entry, path))


def verify(entry: CatalogueModel, path: Path, *, rehash: bool, progress: Progress) -> str:
    """The model's sha256, from its stamps unless ``rehash``; ``path``: of its first file.

    Raises:
        NotFound: ``model_not_pulled``.
        DataLoss: ``model_corrupt``: size or digest differ from the catalogue's.
    """
    files = model_files(entry, path)
    digests = [_digest(entry, file, rehash, progress) for file in files]
    total = sum(file.path.stat().st_size for file in files)
    if entry.size and total != entry.size:
        raise corrupt(entry, path, f"{total} bytes instead of {entry.size}")
    digest = combined_sha256(digests)
    if entry.sha256 and digest != entry.sha256:
        raise corrupt(entry, path, f"sha256 {digest} instead of {entry.sha256}")
    return digest


def _digest(entry: CatalogueModel, file: ModelFile, rehash: bool, progress: Progress) -> str:
    path = file.path
    try:
        stat = path.stat()
    except FileNotFoundError:
        if isinstance(entry.source, PathSource):
            what = f"bring it to {path.parent}, or name another: conductor models add --replace"
        else:
            what = f"get it with: conductor models pull {entry.name}"
        raise NotFound(
            "model_not_pulled",
            f"{entry.name} is not here ({path.name} is missing); {what}",
            path=str(path),
        ) from None
    if file.size and stat.st_size != file.size:
        raise corrupt(entry, path, f"{stat.st_size} bytes instead of {file.size}")
    digest = None if rehash else read_stamp(path)
    if digest is None:
        digest = sha256(path, stat.st_size, progress)
        if not file.sha256 or digest == file.sha256:
            stamp(path, digest, stat)
    if file.sha256 and digest != file.sha256:
        raise corrupt(entry, path, f"sha256 {digest} instead of {file.sha256}")
    return digest


def stamp(path: Path, digest: str, stat: os.stat_result) -> None:
    """Without it, the file is hashed again next time: a read-only folder is no failure."""
    with contextlib.suppress(OSError):
        write_stamp(path, digest, stat)


def sha256(path: Path, total: int, progress: Progress) -> str:
    """The digest of a file of ``total`` bytes, 64 hex digits."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verified", done, total)
    return digest.hexdigest()


def check_magic(path: Path, what: str) -> None:
    """A first look: the worker reads the whole header before it loads anything.

    Args:
        what: how errors call the file.

    Raises:
        InvalidArgument: ``bad_model``.
    """
    try:
        with path.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise InvalidArgument("bad_model", f"cannot read {what}: {error.strerror}") from None
    if magic != _MAGIC:
        raise InvalidArgument(
            "bad_model", f"{what} is no GGUF file: it begins with {magic!r}", path=str(path)
        )


def corrupt(entry: CatalogueModel, path: Path, what: str) -> DataLoss:
    """``path`` is not the file that the catalogue promises."""
    return DataLoss("model_corrupt", f"{path.name} is not {entry.name}: {what}", path=str(path))


def unusable(folder: Path, error: OSError) -> ResourceExhausted | Unavailable:
    """``folder`` cannot be written."""
    text = f"cannot write to {folder}: {error.strerror}; make room there, or set worker.models_dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted("disk_full", text, path=str(folder))
    return Unavailable("models_dir_unusable", text, path=str(folder))


def check_room(entry: CatalogueModel, models_dir: Path, needed: int) -> None:
    """Raises ResourceExhausted ``disk_full``: fewer than ``needed`` bytes are free."""
    free = shutil.disk_usage(models_dir).free
    if free < needed:
        raise ResourceExhausted(
            "disk_full",
            f"{entry.name} needs {size(needed)} in {models_dir} for a moment, {size(free)} are "
            "free; make room, or set worker.models_dir",
            requested_bytes=needed,
            free_bytes=free,
        )
