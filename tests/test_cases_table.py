"""Every test that docs/cases.md names exists, and every row names one of the whole product."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "cases.md").read_text("utf-8")
_TEST_ID = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_ROW = re.compile(r"^\| ([A-G]\d+) \|.*$", re.MULTILINE)
GROUPS = {
    "A": [1, 2, 3, 4, 5, 6, 7, 8],
    "B": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    "C": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14],
    "D": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    "E": [1, 2, 3],
    "F": [1, 2, 3, 4, 5, 6, 7],
}
LABELS = [f"{letter}{number}" for letter, numbers in GROUPS.items() for number in numbers]


@cache
def functions(path: str) -> frozenset[str]:
    """Names of the tests at the top of a module; none if there is no such file."""
    file = ROOT / path
    if not file.exists():
        return frozenset()
    body = ast.parse(file.read_text("utf-8")).body
    found = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(node.name for node in found if node.name.startswith("test_"))


def rows() -> dict[str, str]:
    return {match[1]: match[0] for match in _ROW.finditer(TABLE)}


@pytest.mark.parametrize("test_id", sorted(set(_TEST_ID.findall(TABLE))), ids="::".join)
def test_every_test_that_is_named_exists(test_id: tuple[str, str]) -> None:
    path, name = test_id
    assert name in functions(path)


def test_every_row_is_proved_on_the_whole_product() -> None:
    assert list(rows()) == LABELS
    for label, row in rows().items():
        named = _TEST_ID.findall(row)
        assert named, label
        # Whatever looks like a test is one that the check above reads.
        assert row.count("::") == len(named), label
        assert any(path.startswith("tests/integration/") for path, _ in named), label


def test_the_check_can_fail() -> None:
    assert "test_every_test_that_is_named_exists" in functions("tests/test_cases_table.py")
    assert "rows" not in functions("tests/test_cases_table.py")
    assert functions("tests/test_no_such_file.py") == frozenset()
