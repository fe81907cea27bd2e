"""Reads GBNF, the notation of llama.cpp's grammars (its grammars/README.md). *Pure.*

Tokens by number or name (``<[12]>``) are refused: what follows a grammar here is text. A rule may
be left-recursive, and is defined once.
"""

from __future__ import annotations

from vram_conductor.protocol.limits import GRAMMAR_BYTES_MAX
from vram_conductor.worker.grammar.rules import (
    CHAR_MAX,
    DEPTH_MAX,
    Chars,
    Choice,
    Node,
    Ref,
    Repeat,
    Series,
    bad_grammar,
    inverse,
    too_complex,
)

REPEAT_MAX = 10_000
"""A count in braces; what it expands to is bounded by the automaton."""

_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]"}
_HEX = {"x": 2, "u": 4, "U": 8}


def parse(text: str) -> dict[str, Node]:
    """The rules of a grammar, by name.

    Raises:
        InvalidArgument: ``bad_grammar``, with the line and what is wrong there.
        OutOfRange: ``grammar_too_complex``: longer than GRAMMAR_BYTES_MAX, nested deeper than
            DEPTH_MAX, or with a count above REPEAT_MAX.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > GRAMMAR_BYTES_MAX:
        raise too_complex(
            f"it has {size} bytes, the limit is {GRAMMAR_BYTES_MAX}",
            value=size,
            limit=GRAMMAR_BYTES_MAX,
        )
    reader = _Reader(text)
    rules = reader.rules()
    if "root" not in rules:
        raise bad_grammar("there is no rule named root, with which it would begin")
    for ref in reader.refs:
        if ref.name not in rules:
            line = reader.line(ref.at)
            raise bad_grammar(f"line {line}: no rule is named {ref.name[:80]}", line=line)
    return rules


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.refs: list[Ref] = []

    def line(self, at: int) -> int:
        """The line of a position, from 1."""
        return self._text.count("\n", 0, at) + 1

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._space(lines=True)
        while self._at < len(self._text):
            name = self._name()
            if not name:
                raise self._wrong("a rule's name is expected")
            if name in rules:
                raise self._wrong(f"the rule {name[:80]} is defined twice")
            self._space(lines=False)
            self._expect("::=")
            self._space(lines=True)
            rules[name] = self._choice(0)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._wrong(f"{self._peek()!r} is not expected")
            self._space(lines=True)
        return rules

    def _choice(self, depth: int) -> Node:
        options = [self._series(depth)]
        while self._peek() == "|":
            self._at += 1
            self._space(lines=True)
            options.append(self._series(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _series(self, depth: int) -> Node:
        items: list[Node] = []
        while True:
            item = self._item(depth)
            if item is None:
                return Series(tuple(items))
            self._space(lines=depth > 0)
            repeated = self._repeat(item)
            if repeated is not None:
                self._space(lines=depth > 0)
                if self._peek() in ("*", "+", "?", "{"):
                    raise self._wrong("a repetition of a repetition needs parentheses")
            items.append(repeated or item)

    def _item(self, depth: int) -> Node | None:
        mark = self._peek()
        if mark == '"':
            return self._literal()
        if mark == "[":
            return self._class()
        if mark == ".":
            self._at += 1
            return Chars(((0, CHAR_MAX),))
        if mark == "(":
            if depth == DEPTH_MAX:
                raise too_complex(
                    f"line {self.line(self._at)}: parentheses are nested deeper than {DEPTH_MAX}",
                    limit=DEPTH_MAX,
                )
            self._at += 1
            self._space(lines=True)
            inner = self._choice(depth + 1)
            self._expect(")")
            return inner
        if mark in _NAME:
            at = self._at
            ref = Ref(self._name(), at)
            self.refs.append(ref)
            return ref
        return None

    def _literal(self) -> Node:
        self._at += 1
        items: list[Node] = []
        while self._peek() != '"':
            code = self._char("the literal is not closed")
            items.append(Chars(((code, code),)))
        self._at += 1
        return Series(tuple(items))

    def _class(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        if negated:
            self._at += 1
        ranges: list[tuple[int, int]] = []
        unclosed = "the character class is not closed"
        while self._peek() != "]":
            low = high = self._char(unclosed)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char(unclosed)
            if high < low:
                raise self._wrong("a range of characters ends before it begins")
            ranges.append((low, high))
        self._at += 1
        found = tuple(sorted(ranges))
        return Chars(inverse(found) if negated else found)

    def _char(self, unclosed: str) -> int:
        """The code point of the next character, or of an escape."""
        char = self._peek()
        if not char:
            raise self._wrong(unclosed)
        self._at += 1
        kind = ""
        if char != "\\":
            code = ord(char)
        else:
            kind = self._peek()
            self._at += 1
            if kind in _ESCAPES:
                return ord(_ESCAPES[kind])
            digits = self._text[self._at : self._at + _HEX.get(kind, 0)]
            self._at += len(digits)
            try:
                code = int(digits, 16) if len(digits) == _HEX[kind] and digits.isalnum() else -1
            except (KeyError, ValueError):
                code = -1
        if not 0 <= code <= CHAR_MAX:
            raise self._wrong(f"an unknown escape: \\{kind}")
        return code

    def _repeat(self, item: Node) -> Node | None:
        mark = self._peek()
        if mark == "*":
            least, most = 0, None
        elif mark == "+":
            least, most = 1, None
        elif mark == "?":
            least, most = 0, 1
        elif mark == "{":
            return self._counted(item)
        else:
            return None
        self._at += 1
        return Repeat(item, least, most)

    def _counted(self, item: Node) -> Node:
        end = self._text.find("}", self._at)
        inside = self._text[self._at + 1 : end] if end >= 0 else ""
        first, comma, last = (part.strip() for part in inside.partition(","))
        numbers = [part for part in (first, last) if part]
        if not first or not all(part.isascii() and part.isdigit() for part in numbers):
            raise self._wrong("a repetition is {n}, {n,} or {n,m}")
        most_digits = len(str(REPEAT_MAX))
        if any(len(part) > most_digits or int(part) > REPEAT_MAX for part in numbers):
            raise too_complex(
                f"line {self.line(self._at)}: something is repeated more than {REPEAT_MAX} times",
                limit=REPEAT_MAX,
            )
        least = int(first)
        most = int(last) if last else (None if comma else least)
        if most is not None and most < least:
            raise self._wrong("a repetition's second number is less than the first")
        self._at = end + 1
        return Repeat(item, least, most)

    def _name(self) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] in _NAME:
            self._at += 1
        return self._text[begin : self._at]

    def _space(self, *, lines: bool) -> None:
        """Skip blanks and comments, and ends of lines where they mean nothing."""
        while mark := self._peek():
            if mark == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif mark in " \t" or (lines and mark in "\r\n"):
                self._at += 1
            else:
                return

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _expect(self, what: str) -> None:
        if not self._text.startswith(what, self._at):
            found = repr(self._peek()) if self._peek() else "the end of the text"
            raise self._wrong(f"{what} is expected, not {found}")
        self._at += len(what)

    def _wrong(self, why: str) -> Exception:
        line = self.line(self._at)
        return bad_grammar(f"line {line}: {why}", line=line)
