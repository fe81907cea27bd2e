"""Where the command line writes: tables for people, JSON for programs, news on stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
from dataclasses import fields
from io import TextIOWrapper
from typing import Any, cast

import msgspec

from vram_conductor.client.complaint import explain
from vram_conductor.client.live_line import LiveLine, Waiting
from vram_conductor.client.text import printable, size
from vram_conductor.protocol.errors import ConductorError, LedgerDeny
from vram_conductor.protocol.plain import is_array, is_map
from vram_conductor.protocol.reasons import has_more


class Output:
    """stdout for results, stderr for news and errors.

    Args:
        json: results as one JSON value; human text is not written to stdout then.

    Attributes:
        width, height: of the terminal, or 100 x 24.
        one_line: several values may follow one another: each takes one line, errors too.
    """

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self.one_line = False
        self.width: int
        self.height: int
        self.width, self.height = shutil.get_terminal_size((100, 24))
        self._live = LiveLine()
        self._mid_line = False
        for stream in (sys.stdout, sys.stderr):
            # A terminal that cannot show a character gets a question mark, not a traceback.
            with contextlib.suppress(AttributeError, ValueError):
                cast(TextIOWrapper, stream).reconfigure(errors="replace")

    def value(self, value: Any) -> None:
        """A result for programs (written only with ``--json``)."""
        if self.json:
            data = msgspec.json.encode(_whole(value))
            text = data if self.one_line else msgspec.json.format(data, indent=2)
            with self._live.lock:
                sys.stdout.write(text.decode() + "\n")
                sys.stdout.flush()

    def text(self, text: str, end: str = "\n") -> None:
        """A result for people (not written with ``--json``)."""
        if self.json:
            return
        whole = text + end
        with self._live.lock:
            self._live.clear()
            sys.stdout.write(printable(whole) if sys.stdout.isatty() else whole)
            sys.stdout.flush()
            if whole:
                self._mid_line = not whole.endswith("\n")

    def end_line(self) -> None:
        """Finish the line that :meth:`text` has left open, if any."""
        if self._mid_line:
            self.text("")

    def draw(self, text: str) -> None:
        """A screen of text in place of the one before; one after the other where it is no
        terminal. What does not fit on the screen is cut."""
        if self.json or not sys.stdout.isatty():
            self.text(text + "\n")
            return
        self.width, self.height = shutil.get_terminal_size((100, 24))
        lines = printable(text).splitlines()
        if len(lines) >= self.height:
            hidden = len(lines) - self.height + 2
            lines = [*lines[: self.height - 2], f"… {hidden} more lines: enlarge the window"]
        drawn = "".join(f"{line[: self.width]}\x1b[K\n" for line in lines)
        sys.stdout.write(f"\x1b[H{drawn}\x1b[J")
        sys.stdout.flush()

    def news(self, text: str) -> None:
        """Something worth knowing while it happens; stderr."""
        # Nobody reads stderr any more: no reason to fail.
        with self._live.lock, contextlib.suppress(OSError):
            self._live.clear()
            if self._mid_line and sys.stdout.isatty() and sys.stderr.isatty():
                sys.stderr.write("\n")
                self._mid_line = False
            sys.stderr.write((printable(text) if sys.stderr.isatty() else text) + "\n")
            sys.stderr.flush()

    def progress(self, stage: str, done: int, total: int) -> None:
        """A living line on a terminal, removed at the end; nothing in a log. Sizes in bytes."""
        if done >= total > 0:
            self._live.clear()
            return
        share = f" of {size(total)} ({100 * done / total:.0f} %)" if total else ""
        self._live.draw(f"{stage} {size(done)}{share}")

    def waiting(self, now: str) -> Waiting:
        """A block that shows what is waited for, and how long already."""
        return Waiting(self._live, now)

    def complain(self, error: ConductorError, command: str = "", whom: str = "AGENT") -> None:
        """What went wrong in ``command`` and what to do; a refusal is one line with its
        numbers. ``whom``: agent and conversation, as ``conductor reset`` takes them."""
        lines = explain(error, command, whom)
        # For whoever sits there; a script's log has the reason, and a refusal its own hint.
        more = has_more(error.reason) and not isinstance(error, LedgerDeny)
        if len(lines) == 1 and more and sys.stderr.isatty():
            lines.append(f"what to do: conductor explain {error.reason}")
        for line in lines:
            self.news(f"conductor: {line}")


def _whole(value: Any) -> Any:
    """Plain values with every field: on the wire defaults are left out, a script wants to find
    ``value["usage"]["reused_tokens"]`` when it is 0, too."""
    if isinstance(value, msgspec.Struct) and not value.__struct_config__.array_like:
        kind = value.__struct_config__
        tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
        return tag | {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _whole(getattr(value, field.name)) for field in fields(value)}
    if is_map(value):
        return {key: _whole(item) for key, item in value.items()}
    if is_array(value):
        return [_whole(item) for item in value]
    return msgspec.to_builtins(value)
