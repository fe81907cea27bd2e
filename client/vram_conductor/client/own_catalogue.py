"""The user's own catalogue file: adding and removing entries; the rest stays as it was written."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.protocol.catalogue import (
    CatalogueModel,
    HubSource,
    PathSource,
    WheelSource,
    parse_catalogue,
)
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument, Unavailable

_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*model[ \t]*\]\][ \t]*(?:#.*)?$", re.M)
_BEGIN = """\
# Models of your own. `conductor models add` and `models remove` write here, and so may you.
# What the keys mean: https://toml.io, and configs/models.toml of the project.
"""


def entry_text(entry: CatalogueModel) -> str:
    """The entry in TOML. *Pure.*"""
    lines = ["[[model]]", f"name = {_string(entry.name)}", f"file = {_string(entry.file)}"]
    for key in ("sha256", "size", "licence", "licence_url", "notice", "gated", "n_ctx"):
        value = getattr(entry, key)
        if value not in ("", 0, None, False):
            lines.append(f"{key} = {_string(value) if isinstance(value, str) else _plain(value)}")
    return "\n".join([*lines, f"source = {_source(entry.source)}", ""])


def _source(source: WheelSource | HubSource | PathSource) -> str:
    if isinstance(source, PathSource):
        return f'{{ kind = "path", path = {_string(source.path)} }}'
    if isinstance(source, WheelSource):
        rows = [
            f"{{ package = {_string(part.package)}, version = {_string(part.version)}, "
            f"member = {_string(part.member)} }}"
            for part in source.parts
        ]
        return '{ kind = "pypi-wheel", parts = [\n' + _rows(rows) + "] }"
    rows = [
        f"{{ path = {_string(file.path)}, sha256 = {_string(file.sha256)}, size = {file.size} }}"
        for file in source.files
    ]
    begin = f'kind = "huggingface", repo = {_string(source.repo)}'
    return f"{{ {begin}, revision = {_string(source.revision)}, files = [\n{_rows(rows)}] }}"


def _rows(rows: list[str]) -> str:
    return "".join(f"  {row},\n" for row in rows)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _string(text: str) -> str:
    """A basic string (TOML 1.0): JSON's escapes are among TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")


def without(text: str, name: str, origin: str) -> str:
    """``text`` without the entry of ``name``; all else stays as it is. *Pure.*

    Raises:
        InvalidArgument: ``bad_catalogue``.
        FailedPrecondition: ``catalogue_by_hand``: it is written in a way that only its author can
            take it out of.
    """
    wanted = _parsed(text, origin)
    wanted["model"] = [entry for entry in _entries(wanted) if entry.get("name") != name]
    begins = [found.start() for found in _HEADER.finditer(text)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=False):
        shorter = text[:begin] + _closing_comments(text[begin:end]) + text[end:]
        # A header may also be part of a string: what is left has to say the same of all others.
        with contextlib.suppress(InvalidArgument):
            if {"model": [], **_parsed(shorter, origin)} == wanted:
                return shorter
    raise FailedPrecondition(
        "catalogue_by_hand",
        f"cannot take {name} out of {origin} without touching the rest; edit the file",
    )


def is_bad(text: str, name: str, origin: str) -> bool:
    """Whether the entry of ``name`` is one that no catalogue may have. *Pure.*

    Raises:
        InvalidArgument: ``bad_catalogue``: it is no TOML.
    """
    for entry in _entries(_parsed(text, origin)):
        if entry.get("name") == name:
            try:
                return msgspec.convert(entry, CatalogueModel).problem() is not None
            except msgspec.ValidationError:
                return True
    return False


def _parsed(text: str, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("bad_catalogue", f"{origin}: {error}; correct that file") from None


def _entries(parsed: dict[str, Any]) -> list[dict[str, Any]]:
    """None of a file that has something else there."""
    try:
        return msgspec.convert(parsed.get("model", []), list[dict[str, Any]])
    except msgspec.ValidationError:
        return []


def _closing_comments(block: str) -> str:
    """What is said behind an entry is said of what follows. Its blank lines go with it: as many
    are before it."""
    lines = block.splitlines(keepends=True)
    count = 0
    while count < len(lines) and lines[-1 - count].lstrip()[:1] in ("", "#"):
        count += 1
    return "".join(lines[len(lines) - count :]).lstrip("\n")


class OwnCatalogue:
    """The file at ``path``; it need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, entry: CatalogueModel) -> None:
        """Append ``entry``, in place of one of the same name.

        Raises:
            InvalidArgument: ``bad_catalogue``; FailedPrecondition: ``catalogue_by_hand``;
            Unavailable: ``catalogue_unusable``.
        """
        with self._locked():
            text = self._read()
            if entry.name in self._names(text):
                text = without(text, entry.name, str(self.path))
            self._write(f"{text.rstrip()}\n\n{entry_text(entry)}" if text else self._first(entry))

    def drop(self, name: str) -> bool:
        """Remove the entry of ``name``; False: there is none. Raises as :meth:`put`."""
        with self._locked():
            text = self._read()
            if name not in self._names(text):
                return False
            self._write(without(text, name, str(self.path)))
            return True

    def drop_bad(self, name: str) -> bool:
        """Remove the entry of ``name`` if it is what makes the catalogue a bad one, whatever else
        does; False: it is not. Raises as :meth:`put`."""
        with self._locked():
            text = self._read()
            if not is_bad(text, name, str(self.path)):
                return False
            self._replace(without(text, name, str(self.path)))
            return True

    def _first(self, entry: CatalogueModel) -> str:
        return f"{_BEGIN}\n{entry_text(entry)}"

    def _names(self, text: str) -> list[str]:
        return parse_catalogue(text.encode(), str(self.path)).names()

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """A lock on the folder: two additions at once would lose one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _read(self) -> str:
        try:
            return self.path.read_text("utf-8")
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise self._unusable(error) from None

    def _write(self, text: str) -> None:
        """Whole or not at all; never what could not be read again."""
        parse_catalogue(text.encode(), str(self.path))
        self._replace(text)

    def _replace(self, text: str) -> None:
        target = self.path.resolve()  # a link to it stays one
        try:
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    out.write(text)
                    os.fchmod(out.fileno(), mode)
                Path(name).replace(target)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError | UnicodeDecodeError) -> Unavailable:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        return Unavailable(
            "catalogue_unusable",
            f"cannot use the catalogue {self.path}: {why}; make its folder writable, or set "
            "worker.catalogue to a file of yours",
            path=str(self.path),
        )
