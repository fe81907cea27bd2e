"""Brings a model's files from the Hugging Face hub into the models folder.

What has come is kept when that is interrupted. Nothing takes a file's name before its digest
matched.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vram_conductor.client.hub import Hub
from vram_conductor.client.hub_download import Download
from vram_conductor.client.model_files import (
    ModelFile,
    Progress,
    Say,
    check_room,
    corrupt,
    model_files,
    sha256,
    stamp,
)
from vram_conductor.protocol.catalogue import CatalogueModel, HubFile, HubSource
from vram_conductor.protocol.stamp import read_stamp


def partial(path: Path, digest: str) -> Path:
    """Where what has come of a file is kept: bound to its content, so that another revision
    begins anew. *Pure.*"""
    return path.with_name(f".{path.name}.{digest[:16]}.part")


def fetch_files(
    entry: CatalogueModel, source: HubSource, path: Path, say: Say, progress: Progress
) -> None:
    """Fetch every file that is not there, or not what it should be.

    Args:
        path: where the first of them goes; the others beside it.

    Raises:
        ResourceExhausted: ``disk_full``; DataLoss: ``model_corrupt``; what
            ``hub_errors.explained`` says; OSError: of the folder.
    """
    wanted = [
        (file, remote)
        for file, remote in zip(model_files(entry, path), source.files, strict=True)
        if not _good(file, progress)
    ]
    needed = sum(file.size - _length(partial(file.path, file.sha256)) for file, _ in wanted)
    check_room(entry, path.parent, needed)
    hub = Hub()
    for number, (file, remote) in enumerate(wanted, 1):
        say(f"fetching {source.repo}/{remote.path} ({number} of {len(wanted)})")
        _fetch_file(entry, hub, source, file, remote, say, progress)


def _fetch_file(
    entry: CatalogueModel,
    hub: Hub,
    source: HubSource,
    file: ModelFile,
    remote: HubFile,
    say: Say,
    progress: Progress,
) -> None:
    part = partial(file.path, file.sha256)
    cached = hub.cached(source.repo, source.revision, remote.path)
    if cached is not None and _length(cached) == file.size and not _length(part):
        say(f"copying it from {cached}")
        shutil.copyfile(cached, part)
    while True:
        resumed = _length(part) > 0

        def fetched(done: int) -> None:
            progress("fetched", done, file.size)

        Download(hub, source.repo, source.revision, remote, part, say=say, fetched=fetched).run()
        with part.open("rb") as opened:
            os.fsync(opened.fileno())
        stat = part.stat()
        digest = sha256(part, stat.st_size, progress)
        if digest == file.sha256:
            break
        part.unlink()
        if not resumed:
            what = f"what came has the sha256 {digest} instead of {file.sha256}"
            raise corrupt(entry, file.path, f"{what}; run it again")
        # The beginning may have been what a crash had left of a file.
        say(f"{file.path.name} is not what the catalogue says: fetching all of it again")
    part.replace(file.path)
    stamp(file.path, digest, stat)


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _good(file: ModelFile, progress: Progress) -> bool:
    if not file.path.exists():
        return False
    known = read_stamp(file.path) or sha256(file.path, file.size, progress)
    return known == file.sha256
