"""Models that are split into several files: ``name-00001-of-00003.gguf`` and what belongs to it.

The names are llama.cpp's (``llama_split_path``): a prefix, the part's number from 1 on, and how
many there are, five digits each. A split model is named by its first part, and all parts lie in one
folder. A file with any other name is a model by itself. *Pure.*
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PART = re.compile(r"(?P<prefix>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


@dataclass(frozen=True)
class PartName:
    """What a part's file name says: ``number`` counts from 1 to ``count``."""

    prefix: str
    number: int
    count: int

    def of(self, number: int) -> str:
        """The file name of another part of the same model."""
        return f"{self.prefix}-{number:05d}-of-{self.count:05d}.gguf"


def part_name(file: str) -> PartName | None:
    """What the file name says; None: it is not the name of one of several parts."""
    found = _PART.fullmatch(file)
    if found is None:
        return None
    name = PartName(found["prefix"], int(found["number"]), int(found["count"]))
    return name if 1 <= name.number <= name.count and name.count > 1 else None


def part_paths(path: Path) -> list[Path]:
    """All files of the model that ``path`` is a part of, in order; of any other file: itself."""
    name = part_name(path.name)
    if name is None:
        return [path]
    return [path.with_name(name.of(number)) for number in range(1, name.count + 1)]


def combined_sha256(digests: Sequence[str]) -> str:
    """The digest of a model from those of its parts, in order (64 hex digits each).

    One file's is its own. Of several it is the sha256 of their digests, one per line:
    ``sha256sum name-*-of-00003.gguf | cut -c1-64 | sha256sum``.
    """
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
