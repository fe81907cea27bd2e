"""The single checks that ``validate`` is made of. *Pure.*

Each takes the field's name, so that the error says what is wrong, how much, and what would do.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import InvalidArgument, OutOfRange

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]*")
_SHOWN_CHARS_MAX = 80


def check_rid(rid: bytes) -> None:
    """A request id has RID_BYTES bytes, any.

    Raises:
        InvalidArgument: ``bad_rid``.
    """
    if len(rid) != limits.RID_BYTES:
        raise InvalidArgument(
            "bad_rid",
            f"rid has {limits.RID_BYTES} bytes, this one has {len(rid)}",
            field="rid",
            value=len(rid),
            limit=limits.RID_BYTES,
        )


def check_name(field: str, name: str) -> None:
    """A name: 1 to NAME_CHARS_MAX letters, digits and ``._:@-``, beginning with one of the first.

    Raises:
        InvalidArgument: ``bad_name``.
        OutOfRange: ``limit_exceeded``.
    """
    check_size(field, len(name), limits.NAME_CHARS_MAX, unit="characters")
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            "bad_name",
            f"{field} {_shown(name)!r} is no name; use letters, digits and ._:@- and begin with "
            "a letter or digit",
            field=field,
            value=_shown(name),
        )


def check_text(
    field: str, text: str, chars_max: int, *, empty: bool = True, printable: bool = False
) -> None:
    """A text of at most ``chars_max`` characters that UTF-8 can express.

    Raises:
        InvalidArgument: ``bad_value``: empty, half a surrogate pair, or control characters where
            ``printable`` is asked for.
        OutOfRange: ``limit_exceeded``.
    """
    if not text and not empty:
        raise _bad(field, 0, "must not be empty")
    check_size(field, len(text), chars_max, unit="characters")
    if printable and not text.isprintable():
        raise _bad(field, _shown(text), "contains unprintable characters")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _bad(
                field, len(text), f"has half a surrogate pair at position {error.start}"
            ) from None


def check_size(field: str, size: int, limit: int, *, unit: str = "entries") -> None:
    """Not more than ``limit``.

    Raises:
        OutOfRange: ``limit_exceeded``.
    """
    if size > limit:
        raise OutOfRange(
            "limit_exceeded",
            f"{field} has {size} {unit}, the limit is {limit}",
            field=field,
            value=size,
            limit=limit,
        )


def check_range(field: str, value: int, least: int, limit: int) -> None:
    """An amount: below ``least`` is nonsense, above ``limit`` is too much.

    Raises:
        InvalidArgument: ``bad_value``.
        OutOfRange: ``limit_exceeded``.
    """
    if value < least:
        raise _bad(field, value, f"must be at least {least}", minimum=least, limit=limit)
    if value > limit:
        raise OutOfRange(
            "limit_exceeded",
            f"{field} is {value}, the limit is {limit}",
            field=field,
            value=value,
            limit=limit,
        )


def check_number(
    field: str, value: float, least: float, most: float, *, above: bool = False
) -> None:
    """A finite number in [least, most], or in (least, most] with ``above``.

    Raises:
        InvalidArgument: ``bad_value``.
    """
    if math.isfinite(value) and least <= value <= most and not (above and value == least):
        return
    bracket = "(" if above else "["
    raise _bad(
        field,
        value if math.isfinite(value) else str(value),
        f"must be in {bracket}{least}, {most}]",
        minimum=least,
        maximum=most,
    )


def _shown(text: str) -> str:
    """The beginning, in characters that any encoder accepts."""
    return text[:_SHOWN_CHARS_MAX].encode("utf-8", "backslashreplace").decode()


def _bad(field: str, value: object, why: str, **bounds: Any) -> InvalidArgument:
    return InvalidArgument(
        "bad_value", f"{field} {why} (it is {value!r})", field=field, value=value, **bounds
    )
