"""What every error's reason, and every word of a receipt, means, and what a person does about it.

What it means stands in SPEC.md (the tables below "Reasons"), what to do in ``advice.toml``; nobody
writes either a second time.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

AGAIN = "the same request may succeed later"
"""What ``retryable`` means."""

_HERE = Path(__file__)
_CELLS = re.compile(r"(?<!\\)\|")
_LINK = re.compile(r"\[([^\]]+)\]\(#[^)]*\)")
_WORD = re.compile(r"\w+")
_BRACKETED = re.compile(r"\((\w+)\)")


@dataclass(frozen=True)
class Reason:
    """One reason.

    Attributes:
        name: as it stands in parentheses behind a message.
        group: where SPEC.md lists it.
        codes: names of the status codes that it comes with; none: it is no error but a word of
            receipts.
        retryable: ``yes``, ``no``, or when.
        meaning: when it comes; Markdown of SPEC.md.
        steps: what to do, one after the other or one of them; sentences for a person.
    """

    name: str
    group: str
    codes: tuple[str, ...]
    retryable: str
    meaning: str
    steps: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """Its codes, or that it stands in receipts."""
        return ", ".join(self.codes) or "in receipts"

    @property
    def text(self) -> str:
        """The meaning for a terminal."""
        return plain(self.meaning)


def plain(markdown: str) -> str:
    """Without links; what is to be typed stays between backticks."""
    return _LINK.sub(r"\1 in SPEC.md", markdown).replace("\\|", "|")


def parse(spec: str, advice: Mapping[str, list[str]]) -> dict[str, Reason]:
    """All reasons by name, in SPEC.md's order, and then the words of receipts, from the texts of
    both files."""
    found: dict[str, Reason] = {}
    for group, cells in _rows(spec, "reason"):
        name = cells[0].strip("`")
        codes = tuple(code.strip() for code in cells[1].split(","))
        found[name] = Reason(name, group, codes, cells[2], cells[3], tuple(advice.get(name, ())))
    for group, cells in _rows(spec, "word"):
        name = cells[0].strip("`")
        found[name] = Reason(name, group, (), "no", cells[1], tuple(advice.get(name, ())))
    return found


def parse_codes(spec: str) -> dict[str, str]:
    """What each status code tells, from SPEC.md's text."""
    return {cells[0]: cells[1] for _, cells in _rows(spec, "code") if cells[0].isupper()}


def _rows(spec: str, first: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of all tables whose header begins with ``first``, with the heading above."""
    heading, inside = "", False
    for line in spec.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in _CELLS.split(line)[1:-1]]
        if cells[0] == first:
            inside = True
        elif inside and not cells[0].startswith("---"):
            yield heading, cells


def near(word: str, names: Mapping[str, object], most: int = 5) -> list[str]:
    """Names that ``word`` may have meant: written alike, or with all of its parts."""
    lower = {name.lower(): name for name in names}
    alike = difflib.get_close_matches(word.lower(), lower, n=most, cutoff=0.6)
    parts = [part for part in re.split(r"[\W_]+", word.lower()) if part]
    within = [name for name in lower if parts and all(part in name for part in parts)]
    return [lower[name] for name in dict.fromkeys([*alike, *within])][:most]


def mentioned(text: str, names: Mapping[str, object]) -> list[str]:
    """The names that stand in ``text``, such as a line of a log, in its order; where some stand
    in parentheses, only those: others may be ordinary words there."""
    lower = {name.lower(): name for name in names}
    for pattern in (_BRACKETED, _WORD):
        words = dict.fromkeys(word.lower() for word in pattern.findall(text))
        if found := [lower[word] for word in words if word in lower]:
            return found
    return []


@cache
def reasons() -> dict[str, Reason]:
    """All reasons of this version, by name."""
    return parse(_spec(), _advice())


def has_more(name: str) -> bool:
    """Whether there is more to know of a reason than a message says."""
    reason = reasons().get(name)
    return reason is not None and len(reason.steps) > 1


@cache
def codes() -> dict[str, str]:
    """All status codes of this version: what each tells the caller."""
    return parse_codes(_spec())


def _spec() -> str:
    beside = _HERE.with_name("SPEC.md")
    checkout = _HERE.parents[2] / "SPEC.md"
    return (beside if beside.exists() else checkout).read_text("utf-8")


def _advice() -> dict[str, list[str]]:
    data = _HERE.with_name("advice.toml").read_bytes()
    return msgspec.toml.decode(data, type=dict[str, list[str]])
