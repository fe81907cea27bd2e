"""Sizes as people write them: ``"8 GiB"``."""

from __future__ import annotations

import re

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import InvalidArgument

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?\s*", re.IGNORECASE)
_UNIT = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str | int) -> int:
    """``"1.5 GiB"`` → 1610612736. ``KB`` is 1000 bytes, ``KiB`` is 1024.

    Raises:
        InvalidArgument: ``bad_size``.
    """
    if isinstance(text, int):
        value = text
    else:
        match = _SIZE.fullmatch(text)
        if not match:
            raise InvalidArgument("bad_size", f"{text!r} is no size; write for example '8 GiB'")
        unit = (match[2] or "B").lower()
        base = 1024 if "i" in unit else 1000
        value = int(float(match[1]) * base ** _UNIT[unit[0]])
    if not 0 <= value <= limits.BYTES_MAX:
        raise InvalidArgument("bad_size", f"{text!r} is out of range")
    return value
