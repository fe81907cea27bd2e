"""From what a user wrote after ``model=`` to a file that may be loaded.

A name of the catalogue, a file in an allowed folder, or, where the broker vouches for the user
(same-user ipc), any path. Nothing here opens a model file.
"""

from __future__ import annotations

import stat
from pathlib import Path

from vram_conductor.protocol.catalogue import Catalogue, CatalogueModel, model_path
from vram_conductor.protocol.errors import InvalidArgument, NotFound, PermissionDenied

_SUFFIX = ".gguf"
_LISTED_MAX = 10


class Resolver:
    """Looks models up.

    Args:
        catalogue: the names.
        base: the catalogue file's folder; relative path sources start there.
        models_dir: where pulled files are.
        model_dirs: further folders from which anything may be loaded.
    """

    def __init__(
        self, catalogue: Catalogue, base: Path, models_dir: Path, model_dirs: list[Path]
    ) -> None:
        self._catalogue = catalogue
        self._base = base
        self._models_dir = models_dir
        self._folders = [models_dir, *model_dirs]

    def resolve(self, model: str, *, bare_path: bool) -> Path:
        """The file of ``model``.

        Raises:
            NotFound: ``no_such_model`` (with near names), ``model_not_pulled``.
            PermissionDenied: ``path_not_allowed``.
            InvalidArgument: ``bad_model_name``, ``not_a_file``.
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
                f"{entry.name} is not on this machine yet; run: conductor models pull {entry.name}",
                model=entry.name,
                size_bytes=entry.size,
            )
        return _plain(path)

    def _in_folders(self, name: str) -> Path:
        for folder in self._folders:
            for candidate in (folder / name, folder / (name + _SUFFIX)):
                if name not in {".", ".."} and candidate.is_file():
                    return _plain(candidate)
        raise self._unknown(name)

    def _at_path(self, model: str, bare_path: bool) -> Path:
        path = Path(model)
        if not path.is_absolute():
            inside = [folder / path for folder in self._folders]
            path = next((candidate for candidate in inside if candidate.exists()), inside[0])
        real = path.resolve()
        # Links inside an allowed folder may lead out of it only if the target is allowed itself.
        allowed = any(real.is_relative_to(folder.resolve()) for folder in self._folders)
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

    def _unknown(self, name: str) -> NotFound:
        found = self._files()
        stem = name.rsplit("/", 1)[-1]
        near = self._catalogue.near(stem, found)
        known = self._catalogue.names() + found
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        pullable = self._catalogue.find(near[0]) if near else None
        pull = (
            f"fetch it with: conductor models pull {pullable.name}"
            if pullable
            else (f"known are {', '.join(known[:_LISTED_MAX])}; see: conductor models list")
        )
        return NotFound(
            "no_such_model",
            f"no model {name!r} here; {hint}{pull}",
            model=name,
            near=near,
            known=known[:_LISTED_MAX],
        )

    def _files(self) -> list[str]:
        found: list[str] = []
        for folder in self._folders:
            try:
                found += sorted(path.name for path in folder.glob("*" + _SUFFIX))
            except OSError:
                continue
        return found


def _plain(path: Path) -> Path:
    if not stat.S_ISREG(path.stat().st_mode):
        raise InvalidArgument(
            "not_a_file", f"{path} is not a plain file; give the path of a GGUF file"
        )
    return path
