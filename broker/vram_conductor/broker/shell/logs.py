"""One-line structured logs on stderr, as text or JSON.

Prompts, keys and token ids never reach a log: fields that by their name could hold one are
replaced by their size, whoever passes them.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TextIO, cast

from vram_conductor.protocol.plain import is_map

Level = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
Log = Callable[..., None]
"""``log(level, event, **fields)``."""

LEVELS: dict[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
VALUE_CHARS_MAX = 1000
SECRET = frozenset(
    {"prompt", "messages", "message", "text", "content", "tokens", "ids", "raw", "transcript"}
    | {"key", "secret", "password", "stop", "frames"}
)
"""Field names whose values are never written. Numbers are harmless and pass."""

_PLAIN = re.compile(r"[A-Za-z0-9_.:/@+,%\[\]-]+")


class Logger:
    """Writes log lines.

    Args:
        log_format: ``text`` (``time LEVEL event key=value``) or ``json`` (one object a line).
        level: the lowest level that is written.
        stream: where to; stderr by default.
        wall_s: the wall clock, in seconds.
    """

    def __init__(
        self,
        log_format: LogFormat = "text",
        level: Level = "info",
        stream: TextIO | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._json = log_format == "json"
        self._lowest = LEVELS[level]
        self._stream = stream or sys.stderr
        self._wall_s = wall_s

    def __call__(self, level: str, event: str, /, **fields: Any) -> None:
        """Write one line. Never raises: a closed stderr must not stop the broker."""
        if LEVELS[level] < self._lowest:
            return
        clean = {name: _clean(name, value) for name, value in fields.items()}
        line = (
            self._json_line(level, event, clean) if self._json else self._text(level, event, clean)
        )
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def _stamp(self) -> str:
        now_s = self._wall_s()
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
        return f"{seconds}.{int(now_s * 1000) % 1000:03d}Z"

    def _json_line(self, level: str, event: str, fields: dict[str, Any]) -> str:
        head = {"ts": self._stamp(), "level": level, "event": event}
        return json.dumps({**head, **fields, **head}, separators=(",", ":"))

    def _text(self, level: str, event: str, fields: dict[str, Any]) -> str:
        parts = [self._stamp(), level.upper(), event]
        for name, value in fields.items():
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            # json.dumps escapes line breaks: a peer's name cannot forge a second line.
            parts.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
        return " ".join(parts)


def _clean(name: str, value: Any) -> Any:
    """A value that JSON can hold and that gives nothing away."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in SECRET:
        return f"<{len(value)} withheld>" if hasattr(value, "__len__") else "<withheld>"
    if isinstance(value, bytes | bytearray | memoryview):
        data = cast(bytes, value)
        return bytes(data).hex() if len(data) <= 16 else f"<{len(data)} bytes>"
    if is_map(value):
        return {str(key): _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean("", item) for item in cast(Iterable[Any], value)]
    text = str(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"
