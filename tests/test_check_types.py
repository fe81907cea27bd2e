"""The check that what is public is typed finds what is missing, and says where it saw nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from check_types import PARTS, ROOT, gaps, gather

COMPLETE = """
class Counter:
    def __init__(self, first: int) -> None:
        self.count: int = first

    def add(self, more: int = 1) -> int:
        self.count += more
        return self.count
"""


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("", "", []),
        ("self.count: int", "self.count", ["sample.Counter.count"]),
        (", more: int = 1", ", more", ["sample.Counter.add"]),
        (") -> int", ")", ["sample.Counter.add"]),
    ],
)
def test_a_gap_is_found_and_nothing_else(
    old: str, new: str, missing: list[str], tmp_path: Path
) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (package / "py.typed").touch()
    (package / "__init__.py").write_text(COMPLETE.replace(old, new) if old else COMPLETE)
    assert [line.partition(":")[0] for line in gaps(tmp_path, "sample")] == missing


def test_a_package_that_is_not_there_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="sample was not found"):
        gaps(tmp_path, "sample")


def test_all_parts_are_put_together(tmp_path: Path) -> None:
    gather(ROOT, tmp_path)
    for part in PARTS:
        assert (tmp_path / "vram_conductor" / part / "py.typed").is_file()
