"""Times on the command line. *Pure.*"""

from __future__ import annotations

import argparse
import re

_UNIT_S = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+)\s*(s|m|min|h|d)?", re.IGNORECASE)


def seconds(text: str) -> int:
    """``90s``, ``10m``, ``1h``, ``2d``, ``90`` → seconds.

    Raises:
        ArgumentTypeError: it is no time.
    """
    match = _TIME.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write for example 90s, 10m or 1h")
    return int(match[1]) * _UNIT_S[(match[2] or "").lower()]
