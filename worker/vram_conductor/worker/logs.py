"""The worker's log: one line per record on stderr, as text or JSON.

Records come from the standard ``logging`` module. Prompts, keys and token ids are not logged:
callers log names, sizes, reasons and times.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_PREFIX = "vram_conductor."
_LINE_CHARS_MAX = 4_000


class LineFormatter(logging.Formatter):
    """``time LEVEL module message device=…``, or the same as one JSON object."""

    def __init__(self, log_format: LogFormat, device: str) -> None:
        super().__init__()
        self._json = log_format == "json"
        self._device = device

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        stamp = f"{seconds}.{int(record.msecs):03d}Z"
        where = record.name.removeprefix(_PREFIX)
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        text = text[:_LINE_CHARS_MAX]
        if self._json:
            return json.dumps(
                {
                    "ts": stamp,
                    "level": record.levelname.lower(),
                    "event": where,
                    "message": text,
                    "device": self._device,
                },
                separators=(",", ":"),
            )
        return f"{stamp} {record.levelname} {where} {text} device={self._device}"


def set_up(
    log_format: LogFormat = "text",
    level: str = "info",
    device: str = "",
    stream: TextIO | None = None,
) -> logging.Handler:
    """Send this project's records to ``stream`` (stderr by default); returns the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(log_format, device))
    logger = logging.getLogger("vram_conductor")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # A closed stderr must not stop the worker, nor fill a log with complaints about it.
    logging.raiseExceptions = False
    return handler
