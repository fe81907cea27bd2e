"""A model of the hub without its weights: of every file the beginning, at the whole length.

What a model takes is in the headers of its files, and a dry run reads nothing else. The rest are
holes, which take no room on the disk. The files go with the block.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from vram_conductor.client.hub import Hub
from vram_conductor.client.hub_download import Download
from vram_conductor.client.model_files import Progress, Say
from vram_conductor.protocol.catalogue import HubSource

BEGINNINGS_BYTES = (8 << 20, 32 << 20, 128 << 20)
"""How much is fetched of each file, one after the other until it is enough: the headers of models
with 262,144 tokens have 6 MB, and merges of a byte-level vocabulary add as much."""


class Outline:
    """The files of ``source``.

    Args:
        folder: where they go.
        progress: told ``fetched``, of the sum of the beginnings.
    """

    def __init__(self, source: HubSource, folder: Path, say: Say, progress: Progress) -> None:
        self._source = source
        self._folder = folder
        self._say = say
        self._progress = progress
        self._hub = Hub()
        self._known = 0

    @property
    def path(self) -> Path:
        """Of the first file."""
        return self._path(self._source.files[0].path)

    def fetch(self, most: int) -> None:
        """Have at least ``most`` bytes of each.

        Raises:
            ConductorError: as ``Download.run``. OSError: of the folder.
        """
        total = sum(min(most, file.size) for file in self._source.files)
        before = 0
        for file in self._source.files:
            target, known = self._path(file.path), min(self._known, file.size)
            if target.exists():
                os.truncate(target, known)

            def fetched(done: int, before: int = before) -> None:
                self._progress("fetched", before + done, total)

            Download(
                self._hub,
                self._source.repo,
                self._source.revision,
                file,
                target,
                say=self._say,
                fetched=fetched,
                most=most,
            ).run()
            os.truncate(target, min(most, file.size))
            os.truncate(target, file.size)
            before += min(most, file.size)
        self._known = most

    def _path(self, remote: str) -> Path:
        return self._folder / remote.rpartition("/")[2]


@contextlib.contextmanager
def outline(source: HubSource, say: Say, progress: Progress) -> Generator[Outline]:
    """An outline in a folder of its own, for the block."""
    with tempfile.TemporaryDirectory(prefix="conductor-fit-") as folder:
        yield Outline(source, Path(folder), say, progress)
