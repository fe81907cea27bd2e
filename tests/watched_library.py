"""What the workers of a scene do with llama.cpp's objects, as ``library_watch`` writes it down:
which weights they load and free, and whether two threads meet in one object."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "library_watch"


class WatchedLibrary:
    """Of all workers that are started while ``monkeypatch`` holds.

    Args:
        folder: an empty one; where they write, and where :meth:`held` lays its file.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        path = os.environ.get("PYTHONPATH", "")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *filter(None, [path])]))
        monkeypatch.setenv("WATCH_FOLDER", str(folder))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Everything so far, or all of a kind; in order within each process."""
        found: list[dict[str, Any]] = []
        for file in sorted(self._folder.glob("*.jsonl")):
            lines = file.read_text().split("\n")[:-1]
            found += [json.loads(line) for line in lines]
        return [event for event in found if kind in ("", event["event"])]

    def loads(self, path: str) -> int:
        """How often a load of this file has begun."""
        return sum(event["path"] == path for event in self.events("load"))

    def copies(self, path: str) -> int:
        """How many copies of this file's weights there are now."""
        return self.history()[-1][0][path]

    def history(self) -> list[tuple[Counter[str], int]]:
        """After every event: copies of each file's weights, and loads that are under way. One
        worker at a time."""
        steps: list[tuple[Counter[str], int]] = [(Counter(), 0)]
        path_of: dict[int, str] = {}
        for event in self.events():
            copies, under_way = Counter(steps[-1][0]), steps[-1][1]
            match event["event"]:
                case "load":
                    under_way += 1
                case "loaded":
                    under_way -= 1
                    if event["model"]:
                        path_of[event["model"]] = event["path"]
                        copies[event["path"]] += 1
                case "freed" if event["model"] in path_of:
                    copies[path_of.pop(event["model"])] -= 1
                case _:
                    pass
            steps.append((copies, under_way))
        return steps

    @property
    def clashes(self) -> list[dict[str, Any]]:
        """Calls that met another thread in the same object."""
        return self.events("clash")

    @contextmanager
    def stuck(self, pid: int) -> Generator[None]:
        """Meanwhile no batch of this worker comes back."""
        file = self._folder / "stuck"
        part = file.with_suffix(".part")
        part.write_text(str(pid))
        part.rename(file)
        try:
            yield
        finally:
            file.unlink()

    @contextmanager
    def held(self) -> Generator[None]:
        """Loads that would begin meanwhile wait for the end of it."""
        hold = self._folder / "hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink(missing_ok=True)
