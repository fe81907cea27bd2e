"""The model catalogue (``models.toml``): names, files, sums, licences, sources.

Everything but :func:`load_catalogue` and :func:`packaged_catalogue` is pure. Pulling is done by
the command line; a worker only looks names up. Which files are read: ``catalogue_files``.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path, PurePosixPath

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.split_files import combined_sha256, part_name, part_paths

_NAME = re.compile(r"[A-Za-z0-9._:@-]+")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPO = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_NEAR_MAX = 3


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common base: an unknown key is an error."""


class WheelPart(Entry, frozen=True, kw_only=True):
    """One file inside a wheel: ``member`` of ``package==version``."""

    package: str
    version: str
    member: str


class WheelSource(Entry, frozen=True, kw_only=True, tag_field="kind", tag="pypi-wheel"):
    """Members of wheels from the Python package index, concatenated in order."""

    parts: list[WheelPart]


class HubFile(Entry, frozen=True, kw_only=True):
    """One file of a repository: its path there, the sha256 of its content, its size in bytes."""

    path: str
    sha256: str
    size: int


class HubSource(Entry, frozen=True, kw_only=True, tag_field="kind", tag="huggingface"):
    """Files of a repository on the Hugging Face hub: one, or all parts of a split model.

    Attributes:
        repo: ``owner/name``.
        revision: a commit (40 hex digits), a branch or a tag.
        files: in the order of the parts.
    """

    repo: str
    files: list[HubFile]
    revision: str = "main"


class PathSource(Entry, frozen=True, kw_only=True, tag_field="kind", tag="path"):
    """A file that is on this machine already."""

    path: str


class CatalogueModel(Entry, frozen=True, kw_only=True):
    """One model.

    Attributes:
        name: what users write.
        file: file name in the models folder; of a split model, the first part's.
        sha256: of the whole file, 64 hex digits (empty: unknown, kind ``path`` only); of a split
            model as ``combined_sha256`` says.
        size: of the file, or of all parts, in bytes (0: unknown, kind ``path`` only).
        licence, licence_url, notice: what a user has to know before using it.
        gated: a pull needs the user's acceptance of the licence.
        n_ctx: context that it was trained with, in tokens: the most that an agent may ask for.
            For people who choose; the worker goes by the file. None: not known.
        source: where the file comes from.
    """

    name: str
    file: str
    source: WheelSource | HubSource | PathSource
    sha256: str = ""
    size: int = 0
    licence: str = ""
    licence_url: str = ""
    notice: str = ""
    gated: bool = False
    n_ctx: int | None = None

    def problem(self) -> str | None:
        """What is wrong with this entry, or None."""
        if not _NAME.fullmatch(self.name) or len(self.name) > limits.NAME_CHARS_MAX:
            return f"name {self.name!r} may have letters, digits and ._:@- only"
        plain = self.file == PurePosixPath(self.file).name and self.file.isprintable()
        if not plain or self.file.startswith("."):
            return f"file {self.file!r} must be a plain file name"
        if self.n_ctx is not None and not 0 < self.n_ctx <= limits.N_CTX_MAX:
            return f"n_ctx {self.n_ctx} is out of range"
        if isinstance(self.source, PathSource):
            if not self.source.path:
                return "source.path is empty"
            if not _writable(self.source.path):
                return f"source.path {self.source.path!r} is no path in UTF-8"
            if not self.sha256 and self.size == 0:
                return None
        if not _SHA256.fullmatch(self.sha256):
            return "sha256 must be 64 lower-case hex digits"
        if not 0 < self.size <= limits.BYTES_MAX:
            return f"size {self.size} must be the file's size in bytes"
        if isinstance(self.source, WheelSource):
            if part_name(self.file):
                return "a split model cannot come from wheels"
            return _parts_problem(self.source.parts)
        if isinstance(self.source, HubSource):
            return self._hub_problem(self.source)
        return None

    def _hub_problem(self, source: HubSource) -> str | None:
        if not _REPO.fullmatch(source.repo):
            return f"source.repo {source.repo!r} must be owner/name"
        if not _REVISION.fullmatch(source.revision):
            return f"source.revision {source.revision!r} must be a commit, a branch or a tag"
        needed = len(part_paths(Path(self.file)))
        if len(source.files) != needed:
            return f"{self.file} has {needed} parts, source.files {len(source.files)}"
        for file in source.files:
            if not _inside(file.path):
                return f"path {file.path!r} must be a path inside the repository"
            if not _SHA256.fullmatch(file.sha256) or file.size <= 0:
                return f"{file.path} needs its sha256 (64 lower-case hex digits) and size in bytes"
        if sum(file.size for file in source.files) != self.size:
            return "size is not the sum of source.files"
        if combined_sha256([file.sha256 for file in source.files]) != self.sha256:
            return "sha256 is not that of source.files"
        return None


def _inside(path: str) -> bool:
    pure = PurePosixPath(path)
    return bool(path) and _writable(path) and not pure.is_absolute() and ".." not in pure.parts


def _writable(path: str) -> bool:
    """Whether a file can have this name, and a catalogue hold it: no NUL, and in UTF-8."""
    return "\0" not in path and not any("\ud800" <= letter <= "\udfff" for letter in path)


def _parts_problem(parts: list[WheelPart]) -> str | None:
    if not parts:
        return "source.parts is empty"
    for part in parts:
        # pip would take what begins with a dash for an option.
        if not _PACKAGE.fullmatch(part.package) or not _VERSION.fullmatch(part.version):
            return f"{part.package!r} == {part.version!r} is no package and its version"
        if not _inside(part.member):
            return f"member {part.member!r} must be a path inside the wheel"
    return None


class Catalogue(Entry, frozen=True, kw_only=True):
    """All models, in the file's order; names are unique."""

    model: list[CatalogueModel] = []

    def find(self, name: str) -> CatalogueModel | None:
        """The entry of ``name``, or None."""
        return next((entry for entry in self.model if entry.name == name), None)

    def names(self) -> list[str]:
        """All names, in order."""
        return [entry.name for entry in self.model]

    def near(self, name: str, others: list[str] | None = None) -> list[str]:
        """Names that look like ``name`` (``others``: more names to compare with)."""
        known = {known.lower(): known for known in self.names() + (others or [])}
        hits = difflib.get_close_matches(name.lower(), list(known), n=_NEAR_MAX, cutoff=0.4)
        return [known[hit] for hit in hits]


def parse_catalogue(data: bytes, origin: str) -> Catalogue:
    """Decode and check a catalogue; ``origin`` names it in errors.

    Raises:
        InvalidArgument: ``bad_catalogue``.
    """
    try:
        catalogue = msgspec.toml.decode(data, type=Catalogue)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidArgument("bad_catalogue", f"{origin}: {error}; correct that file") from None
    seen: set[str] = set()
    for entry in catalogue.model:
        problem = entry.problem()
        if problem is None and entry.name in seen:
            problem = "the name is there twice"
        if problem is not None:
            raise InvalidArgument(
                "bad_catalogue",
                f"{origin}: model {entry.name!r}: {problem}; correct it in that file, or take it "
                "out of your own: conductor models remove NAME",
            )
        seen.add(entry.name)
    return catalogue


def model_path(entry: CatalogueModel, models_dir: Path, base: Path) -> Path:
    """Where the file of ``entry`` lies once it is there; ``base``: the catalogue's folder."""
    if isinstance(entry.source, PathSource):
        return base / entry.source.path
    return models_dir / entry.file


def packaged_catalogue() -> Path:
    """The catalogue that comes with the package (in a checkout: ``configs/models.toml``)."""
    here = Path(__file__).resolve()
    beside = here.with_name("models.toml")
    return beside if beside.exists() else here.parents[3] / "configs" / "models.toml"


def load_catalogue(path: Path | None = None) -> Catalogue:
    """Read a catalogue; None reads the packaged one.

    Raises:
        InvalidArgument: ``bad_catalogue``: unreadable, not TOML, unknown key, wrong entry.
    """
    path = path or packaged_catalogue()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(
            "bad_catalogue", f"cannot read the model catalogue {path}: {error.strerror}"
        ) from None
    return parse_catalogue(data, str(path))
