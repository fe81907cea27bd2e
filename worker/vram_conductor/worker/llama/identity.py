"""Which files a model consists of, and who it is."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.protocol.errors import NotFound
from vram_conductor.protocol.split_files import part_paths


@dataclass(frozen=True)
class ModelFiles:
    """A model's files as they are on the disk, the one that names it first.

    Attributes:
        paths, sizes: of each file; sizes in bytes.
        id: twelve hex digits over (device, inode, size, mtime_ns) of every file: two names of a
            file are one model, a replaced file is another.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    id: str

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes)


def model_files(path: str) -> ModelFiles:
    """Look at a model's files, without opening them.

    Args:
        path: the file, or the first of several parts.

    Raises:
        NotFound: ``no_such_model``; ``model_part_missing``: the first is there.
    """
    paths = tuple(str(part) for part in part_paths(Path(path)))
    stats: list[os.stat_result] = []
    for number, part in enumerate(paths, 1):
        found = _stat(part)
        if isinstance(found, str):
            raise _missing(part, number, len(paths), found)
        stats.append(found)
    identity = "\n".join(f"{s.st_dev}:{s.st_ino}:{s.st_size}:{s.st_mtime_ns}" for s in stats)
    return ModelFiles(
        paths=paths,
        sizes=tuple(found.st_size for found in stats),
        id=hashlib.blake2b(identity.encode(), digest_size=6).hexdigest(),
    )


def _stat(path: str) -> os.stat_result | str:
    """``stat`` of a regular file, or why there is none: opening anything else might block for
    ever."""
    try:
        found = os.stat(path)  # noqa: PTH116 - paths are strings throughout the engine contract
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return found if stat.S_ISREG(found.st_mode) else "not a regular file"


def _missing(path: str, number: int, count: int, why: str) -> NotFound:
    if number == 1:
        return NotFound(
            "no_such_model",
            f"cannot open the model file {path!r}: {why}; check the name, or pull it",
            path=path,
        )
    return NotFound(
        "model_part_missing",
        f"cannot open {path!r}, part {number} of {count} of its model: {why}; put it beside the "
        "others, or pull the model again",
        path=path,
        part=number,
        parts=count,
    )
