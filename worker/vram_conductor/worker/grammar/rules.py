"""What a grammar's text says, as a tree. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.errors import InvalidArgument, OutOfRange

DEPTH_MAX = 100
"""Parentheses within parentheses."""

CHAR_MAX = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, ascending: first and last of each range."""


@dataclass(frozen=True)
class Chars:
    """One character out of ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True)
class Ref:
    """Whatever the rule ``name`` describes; ``at``: where in the text, for messages."""

    name: str
    at: int


@dataclass(frozen=True)
class Series:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """One of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """``least`` to ``most`` times; None: any number."""

    item: Node
    least: int
    most: int | None


Node = Chars | Ref | Series | Choice | Repeat


def inverse(ranges: Ranges) -> Ranges:
    """All other characters."""
    out: list[tuple[int, int]] = []
    first = 0
    for low, high in sorted(ranges):
        if first < low:
            out.append((first, low - 1))
        first = max(first, high + 1)
    if first <= CHAR_MAX:
        out.append((first, CHAR_MAX))
    return tuple(out)


def bad_grammar(why: str, **details: int) -> InvalidArgument:
    """The error for a text that is no grammar."""
    error = InvalidArgument("bad_grammar", f"the grammar is refused: {why}")
    error.details.update(details)
    return error


def too_complex(why: str, **details: int) -> OutOfRange:
    """The error for a grammar beyond a limit."""
    error = OutOfRange("grammar_too_complex", f"the grammar is too complex: {why}")
    error.details.update(details)
    return error
