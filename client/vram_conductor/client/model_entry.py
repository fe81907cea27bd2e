"""Makes the catalogue's entry of a model from what the user said about where it comes from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from vram_conductor.client.fetch_hub import partial
from vram_conductor.client.fetch_wheels import fetch_wheels
from vram_conductor.client.hub import Hub, Repo, RepoFile
from vram_conductor.client.model_files import (
    Progress,
    Say,
    check_magic,
    here,
    model_files,
    unusable,
    verify,
)
from vram_conductor.client.model_places import ModelPlaces
from vram_conductor.client.model_source import HubPlace, choose, parse_source
from vram_conductor.client.pull import one_at_a_time
from vram_conductor.protocol.catalogue import (
    CatalogueModel,
    HubFile,
    HubSource,
    PathSource,
    WheelPart,
    WheelSource,
)
from vram_conductor.protocol.errors import InvalidArgument, NotFound
from vram_conductor.protocol.limits import N_CTX_MAX
from vram_conductor.protocol.split_files import combined_sha256, part_name, part_paths
from vram_conductor.protocol.stamp import read_stamp

_NAME_BYTES_MAX = 255
"""Of a file's name, in the file systems of Linux (NAME_MAX)."""


@dataclass(frozen=True)
class EntryMaker:
    """Of entries for the catalogue at ``places``; ``say`` and ``progress`` tell what happens."""

    places: ModelPlaces
    say: Say
    progress: Progress

    def make(self, name: str, sources: Sequence[str]) -> CatalogueModel:
        """The entry of ``name``; a model in wheels is fetched, since nobody names its digest.

        Args:
            sources: one, or several members of wheels that belong behind each other.

        Raises:
            InvalidArgument: ``bad_model_source``, ``ambiguous_model``, ``bad_model``,
                ``bad_catalogue``: the name; NotFound: ``no_such_file``, ``no_such_repo``,
                ``model_part_missing``; from the hub and from pip as they say.
        """
        meant = [parse_source(source) for source in sources]
        first = meant[0]
        # All that can be known to be wrong is said before anything is fetched.
        _checked(CatalogueModel(name=name, file="x", source=PathSource(path="x")))
        if isinstance(first, HubPlace) and len(meant) == 1:
            return _checked(self._of_hub(name, first))
        if isinstance(first, str) and len(meant) == 1:
            return _checked(_of_path(name, first))
        parts = [part for part in meant if isinstance(part, WheelPart)]
        if len(parts) != len(meant):
            raise InvalidArgument(
                "bad_model_source", "only members of wheels (pypi:…) can be put together"
            )
        return _checked(self._of_wheels(name, parts))

    def _of_hub(self, name: str, place: HubPlace) -> CatalogueModel:
        repo = Hub().repo(place.repo, place.revision)
        known = {file.path: file for file in repo.files}
        files = [_hub_file(repo, known[path]) for path in choose(place, list(known))]
        n_ctx = repo.n_ctx if repo.n_ctx and 0 < repo.n_ctx <= N_CTX_MAX else None
        digest = combined_sha256([file.sha256 for file in files])
        total = sum(file.size for file in files)
        plain = PurePosixPath(files[0].path).name
        entry = CatalogueModel(
            name=name,
            file=plain,
            sha256=digest,
            size=total,
            licence=repo.licence,
            licence_url=repo.licence_url,
            n_ctx=n_ctx,
            source=HubSource(repo=repo.name, revision=repo.revision, files=files),
        )
        _check_length(partial(Path(plain), digest).name, plain)
        if self._taken(entry):
            owned = f"{repo.name.replace('/', '--')}--{plain}"
            _check_length(partial(Path(owned), digest).name, owned)
            entry = msgspec.structs.replace(entry, file=owned)
        if repo.gated:
            self.say(f"{repo.name} is gated: accept its terms there before you pull it")
        return entry

    def _of_wheels(self, name: str, parts: Sequence[WheelPart]) -> CatalogueModel:
        source = WheelSource(parts=list(parts))
        file = PurePosixPath(parts[0].member).name
        # A file in several pieces is often called .part00 and so on.
        file = file[: file.find(".gguf") + len(".gguf")] if ".gguf" in file else f"{name}.gguf"
        draft = CatalogueModel(name=name, file=file, source=source)
        path = self.places.path(draft)
        if here(draft, path):
            raise InvalidArgument(
                "bad_model_source", f"{path} is there already; remove it, or add it by its path"
            )
        with one_at_a_time(path.parent, self.say):
            try:
                fetch_wheels(draft, source, path, self.say, self.progress)
            except OSError as error:
                raise unusable(path.parent, error) from None
        check_magic(path, str(path))
        digest = verify(draft, path, rehash=False, progress=self.progress)
        return msgspec.structs.replace(draft, sha256=digest, size=path.stat().st_size)

    def _taken(self, entry: CatalogueModel) -> bool:
        """Whether the name of its file is that of something else."""
        for other in self.places.files.load().model:
            if other.name != entry.name and other.file == entry.file:
                return other.sha256 != entry.sha256
        return any(
            file.path.exists()
            and (
                file.path.stat().st_size != file.size
                or read_stamp(file.path) not in (None, file.sha256)
            )
            for file in model_files(entry, self.places.path(entry))
        )


def _check_length(longest: str, file: str) -> None:
    """Raises InvalidArgument ``bad_model_source``: ``longest``, under which what has come of
    ``file`` is kept, is no name that a file can have."""
    over = len(os.fsencode(longest)) - _NAME_BYTES_MAX
    if over > 0:
        n_bytes = len(os.fsencode(file))
        raise InvalidArgument(
            "bad_model_source",
            f"the file name {file} has {n_bytes} bytes, {n_bytes - over} are the most; download "
            "it yourself under a shorter name and add it by its path",
        )


def _hub_file(repo: Repo, file: RepoFile) -> HubFile:
    if not file.sha256 or not file.size:
        raise NotFound(
            "no_such_file",
            f"the hub names no digest or no size of {repo.name}/{file.path}, so what comes could "
            "not be verified; download it yourself and add it by its path",
            repo=repo.name,
        )
    return HubFile(path=file.path, sha256=file.sha256, size=file.size)


def _of_path(name: str, text: str) -> CatalogueModel:
    """A file that is here already; it stays the user's, who may change it: no digest is kept."""
    # Not resolved: a link may lead to another file tomorrow. ~ of nobody stays as it is.
    path = Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111
    part = part_name(path.name)
    if part and part.number != 1:
        path = path.with_name(part.of(1))
    for file in part_paths(path):
        if not file.is_file() and part:
            raise NotFound("model_part_missing", f"{file} is missing", path=str(file))
        if not file.is_file():
            raise NotFound("no_such_file", f"there is no file {file}", path=str(file))
    check_magic(path, str(path))
    return CatalogueModel(name=name, file=path.name, source=PathSource(path=str(path)))


def _checked(entry: CatalogueModel) -> CatalogueModel:
    problem = entry.problem()
    if problem is not None:
        raise InvalidArgument("bad_catalogue", f"model {entry.name!r}: {problem}")
    return entry
