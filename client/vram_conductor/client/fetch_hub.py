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
    check_magic,
    check_room,
    corrupt,
    model_files,
    sha256,
    stamp,
)
from vram_conductor.protocol.catalogue import CatalogueModel, HubFile, HubSource
from vram_conductor.protocol.errors import InvalidArgument
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
        ResourceExhausted: ``disk_full``; DataLoss: ``model_corrupt``; InvalidArgument:
            ``bad_model``: the first is no GGUF file; what ``hub_errors.explained`` says; OSError:
            of the folder.
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
        part = _fetch_file(entry, hub, source, file, remote, say, progress)
        if file.path == path:
            _check_begin(part, f"{source.repo}/{remote.path}")
        stat = part.stat()
        part.replace(file.path)
        stamp(file.path, file.sha256, stat)


def _check_begin(part: Path, what: str) -> None:
    """Nothing that is no model takes a model's name, though it be what the hub promised."""
    try:
        check_magic(part, what)
    except InvalidArgument:
        part.unlink()
        raise


def _fetch_file(
    entry: CatalogueModel,
    hub: Hub,
    source: HubSource,
    file: ModelFile,
    remote: HubFile,
    say: Say,
    progress: Progress,
) -> Path:
    """Where the file is now, with the digest that it should have."""
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
        digest = sha256(part, part.stat().st_size, progress)
        if digest == file.sha256:
            return part
        part.unlink()
        if not resumed:
            what = f"what came has the sha256 {digest} instead of {file.sha256}"
            raise corrupt(entry, file.path, f"{what}; run it again")
        # The beginning may have been what a crash had left of a file.
        say(f"{file.path.name} is not what the catalogue says: fetching all of it again")


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
