"""From what a user wrote after ``model=`` to a file that may be loaded.

A name of the catalogue, a file in an allowed folder, or, where the broker vouches for the user
(same-user ipc), any path. A model in several parts is named by the first one, or in a folder by
what its parts' names have in common. Nothing here opens a model file.
"""

from __future__ import annotations

import stat
from pathlib import Path

from vram_conductor.protocol.catalogue import Catalogue, CatalogueModel, model_path
from vram_conductor.protocol.catalogue_files import CatalogueFiles
from vram_conductor.protocol.errors import InvalidArgument, NotFound, PermissionDenied
from vram_conductor.protocol.split_files import PartName, part_name, part_paths

_SUFFIX = ".gguf"
_LISTED_MAX = 10
_ALONE = PartName("", 1, 1)
"""What a file that is no part counts as."""


class Resolver:
    """Looks models up.

    Args:
        catalogue: the names; of files, as they are when somebody asks.
        base: the catalogue file's folder; relative path sources start there.
        models_dir: where pulled files are.
        model_dirs: further folders from which anything may be loaded.
        host: whose folders these are; messages name it, since they may be read on another one.
    """

    def __init__(
        self,
        catalogue: Catalogue | CatalogueFiles,
        base: Path,
        models_dir: Path,
        model_dirs: list[Path],
        host: str = "",
    ) -> None:
        self._names = catalogue
        self._base = base
        self._models_dir = models_dir
        self._folders = [models_dir, *model_dirs]
        self._where = f"the worker's host, {host}" if host else "the worker's host"

    @property
    def _catalogue(self) -> Catalogue:
        names = self._names
        return names.latest() if isinstance(names, CatalogueFiles) else names

    def resolve(self, model: str, *, bare_path: bool) -> Path:
        """The file of ``model``.

        Raises:
            NotFound: ``no_such_model`` (with near names), ``model_not_pulled``,
                ``model_part_missing``.
            PermissionDenied: ``path_not_allowed``.
            InvalidArgument: ``bad_model_name``, ``not_a_file``, ``not_the_first_part``.
        """
        if not model or "\0" in model or len(model) > 4096:
            raise InvalidArgument("bad_model_name", "give a catalogue name or the path of a GGUF")
        entry = self._catalogue.find(model)
        try:
            if entry is not None:
                return self._of_catalogue(entry)
            if "/" not in model:
                return self._in_folders(model)
            return self._at_path(model, bare_path)
        except (OSError, RuntimeError):  # too long, a loop of links, no permission to look
            raise self._unknown(model) from None

    def expected_sha256(self, path: Path) -> str:
        """What the catalogue says about the content of ``path``; empty if nothing."""
        for entry in self._catalogue.model:
            if model_path(entry, self._models_dir, self._base) == path:
                return entry.sha256
        return ""

    def _of_catalogue(self, entry: CatalogueModel) -> Path:
        path = model_path(entry, self._models_dir, self._base)
        if not path.exists():
            raise NotFound(
                "model_not_pulled",
                f"{entry.name} is not on {self._where}, yet; run there: conductor models pull "
                f"{entry.name}",
                model=entry.name,
                size_bytes=entry.size,
            )
        return _plain(path)

    def _in_folders(self, name: str) -> Path:
        for folder in self._folders:
            for candidate in (
                folder / name,
                folder / (name + _SUFFIX),
                *_first_parts(folder, name),
            ):
                if name not in {".", ".."} and candidate.is_file():
                    return _plain(candidate)
        raise self._unknown(name)

    def _at_path(self, model: str, bare_path: bool) -> Path:
        path = Path(model)
        if not path.is_absolute():
            inside = [folder / path for folder in self._folders]
            path = next((candidate for candidate in inside if candidate.exists()), inside[0])
        allowed = all(self._allowed(part) for part in part_paths(path))
        if not allowed and not (bare_path and Path(model).is_absolute()):
            folders = ", ".join(str(folder) for folder in self._folders)
            raise PermissionDenied(
                "path_not_allowed",
                f"models are loaded from {folders}; put the file there, or add its folder to "
                "worker.model_dirs",
                folders=[str(folder) for folder in self._folders],
            )
        if not path.exists():
            raise self._unknown(model)
        return _plain(path)

    def _allowed(self, path: Path) -> bool:
        # Links inside an allowed folder may lead out of it only if the target is allowed itself.
        real = path.resolve()
        return any(real.is_relative_to(folder.resolve()) for folder in self._folders)

    def _unknown(self, name: str) -> NotFound:
        found = self._files()
        stem = name.rsplit("/", 1)[-1]
        near = self._catalogue.near(stem, found)
        known = self._catalogue.names() + found
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        pullable = self._catalogue.find(near[0]) if near else None
        pull = (
            f"fetch it there with: conductor models pull {pullable.name}"
            if pullable
            else (f"known are {', '.join(known[:_LISTED_MAX])}; see there: conductor models list")
        )
        return NotFound(
            "no_such_model",
            f"no model {name!r} on {self._where}; {hint}{pull}",
            model=name,
            near=near,
            known=known[:_LISTED_MAX],
        )

    def _files(self) -> list[str]:
        found: list[str] = []
        for folder in self._folders:
            try:
                names = sorted(path.name for path in folder.glob("*" + _SUFFIX))
                found += [name for name in names if (part_name(name) or _ALONE).number == 1]
            except OSError:
                continue
        return found


def _first_parts(folder: Path, prefix: str) -> list[Path]:
    """First parts of split models whose names begin with ``prefix``; of several, the one with the
    fewest parts is first."""
    try:
        found = sorted(folder.glob(f"*-00001-of-*{_SUFFIX}"))
    except OSError:
        return []
    names = [(path, part_name(path.name)) for path in found]
    return [path for path, name in names if name is not None and name.prefix == prefix]


def _plain(path: Path) -> Path:
    name = part_name(path.name)
    if name is not None and name.number != 1:
        raise InvalidArgument(
            "not_the_first_part",
            f"{path.name} is part {name.number} of {name.count}; name the model by the first one, "
            f"{name.of(1)}",
            first=name.of(1),
        )
    for part in part_paths(path):
        _check_plain(part)
    return path


def _check_plain(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        name = part_name(path.name)
        if name is None or name.number == 1:
            raise
        raise NotFound(
            "model_part_missing",
            f"{path.name}, part {name.number} of {name.count} of its model, is not in "
            f"{path.parent}; put it there, or pull the model again",
            path=str(path),
            part=name.number,
            parts=name.count,
        ) from None
    if not stat.S_ISREG(mode):
        raise InvalidArgument(
            "not_a_file", f"{path} is not a plain file; give the path of a GGUF file"
        )
