"""What is typed into ``conductor chat``: messages of one line or many, and commands."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from vram_conductor.protocol.errors import InvalidArgument

FENCE = '"""'
FIRST, MORE = "> ", "… "


@dataclass(frozen=True)
class Typed:
    """A message, or a command with its argument."""

    text: str
    is_command: bool = False

    @property
    def command(self) -> tuple[str, str]:
        """Its word, without the slash, and what follows it."""
        word, _, rest = self.text[1:].partition(" ")
        return word, rest.strip()


class ChatInput:
    """Reads what is typed, or piped.

    A line that ends with a backslash goes on with the next one. A line that begins with three
    quotation marks begins a text that goes on up to three more at the end of a line; nothing in it
    is a command. ``//`` at the beginning stands for a slash.

    Args:
        line: the next line without its end, for a prompt; raises EOFError. None: from stdin.

    Attributes:
        is_terminal: somebody sits there: prompts are shown, an unfinished text is thrown away.
    """

    def __init__(
        self, line: Callable[[str], str] | None = None, *, is_terminal: bool | None = None
    ) -> None:
        both = sys.stdin.isatty() and sys.stdout.isatty()
        self.is_terminal: bool = both if is_terminal is None else is_terminal
        self._line = line or (_typed_line() if self.is_terminal else _piped_line)

    def read(self) -> Typed | None:
        """The next message that is not empty, or command; None at the end.

        Raises:
            InvalidArgument: ``bad_input``: what was piped is not UTF-8.
        """
        while True:
            try:
                first = self._line(FIRST)
            except EOFError:
                return None
            try:
                text = self._whole(first)
            except EOFError as end:
                if self.is_terminal:
                    return None
                text = str(end)
            if not text.strip():
                continue
            plain = first.startswith("/") and not first.lstrip().startswith(FENCE)
            if plain and not first.startswith("//"):
                return Typed(text.strip(), is_command=True)
            return Typed(text[1:] if plain else text)

    def _whole(self, first: str) -> str:
        """The text that ``first`` begins. Raises EOFError with what there is of it."""
        if first.lstrip().startswith(FENCE):
            return self._fenced(first.lstrip()[len(FENCE) :])
        lines = [first]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._more(lines))
        return "\n".join(lines)

    def _fenced(self, first: str) -> str:
        lines = [first] if first.strip() else []
        while not (lines and lines[-1].rstrip().endswith(FENCE)):
            lines.append(self._more(lines))
        lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
        return "\n".join(lines if lines[-1] else lines[:-1])

    def _more(self, lines: list[str]) -> str:
        try:
            return self._line(MORE)
        except EOFError:
            raise EOFError("\n".join(lines)) from None


def _typed_line() -> Callable[[str], str]:
    """``input``, with editing and the lines before where the library is there."""
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # input() uses it from now on
    return input


def _piped_line(prompt: str) -> str:
    try:
        line = sys.stdin.buffer.readline().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            "bad_input", f"stdin is not UTF-8 (byte {error.start} of a line); convert it first"
        ) from None
    if not line:
        raise EOFError
    return line.rstrip("\r\n")
