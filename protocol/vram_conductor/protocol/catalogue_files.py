"""Which catalogue is in use: the user's own file before the packaged one, or the one that was set.

Without ``worker.catalogue`` it is ``models.toml`` beside the user's configuration, written by
``conductor models add``, and behind it the one that comes with the package: a name of the first
hides the same name of the second. With ``worker.catalogue`` it is that file alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vram_conductor.protocol.catalogue import (
    Catalogue,
    CatalogueModel,
    PathSource,
    load_catalogue,
    packaged_catalogue,
)
from vram_conductor.protocol.config import WorkerConfig, config_home
from vram_conductor.protocol.errors import InvalidArgument

log: logging.Logger = logging.getLogger(__name__)

OWN_FILE = "models.toml"

_Seen = tuple[tuple[int, int, int] | None, ...]


class CatalogueFiles:
    """The catalogue in use, read again when one of its files has changed.

    Args:
        config: names the catalogue, or does not.
        env: where the user's configuration lies.

    Attributes:
        own: the file that ``conductor models add`` writes; it need not exist.
    """

    def __init__(self, config: WorkerConfig, env: Mapping[str, str] = os.environ) -> None:
        if config.catalogue:
            self.own: Path = Path(config.catalogue)
            self._files = [self.own]
            self._needed = {self.own}
        else:
            self.own = config_home(env).with_name(OWN_FILE)
            self._files = [self.own, packaged_catalogue()]
            self._needed = {packaged_catalogue()}
        self._seen: _Seen | None = None
        self._complained: _Seen | None = None
        self._known = Catalogue()

    def load(self) -> Catalogue:
        """All models as the files are now; paths of ``path`` sources are absolute.

        Raises:
            InvalidArgument: ``bad_catalogue``.
        """
        seen = tuple(_identity(file) for file in self._files)
        if seen != self._seen:
            entries: dict[str, CatalogueModel] = {}
            for file in self._files:
                for entry in self.of(file).model:
                    entries.setdefault(entry.name, entry)
            self._known, self._seen = Catalogue(model=list(entries.values())), seen
        return self._known

    def of(self, file: Path) -> Catalogue:
        """What one of the files says; a file of the user's that is not there says nothing.

        Raises:
            InvalidArgument: ``bad_catalogue``.
        """
        if file not in self._needed and not file.exists():
            return Catalogue()
        return Catalogue(model=[_absolute(entry, file) for entry in load_catalogue(file).model])

    def latest(self) -> Catalogue:
        """As :meth:`load`, for a process that runs on: while a file is broken, what was known
        before counts, and the log says why."""
        try:
            return self.load()
        except InvalidArgument as error:
            seen = tuple(_identity(file) for file in self._files)
            if seen != self._complained:
                log.warning("the catalogue stays as it was: %s", error.info.message)
                self._complained = seen
            return self._known


def _absolute(entry: CatalogueModel, file: Path) -> CatalogueModel:
    """Relative paths start at the folder of the file that names them."""
    if not isinstance(entry.source, PathSource):
        return entry
    path = str(file.absolute().parent / entry.source.path)
    return msgspec.structs.replace(entry, source=PathSource(path=path))


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
