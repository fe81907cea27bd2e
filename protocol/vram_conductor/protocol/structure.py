"""Checks of what an answer must look like: DECODE's ``grammar`` and ``json_schema``. *Pure.*

Size and nesting only; what it means is looked at where the model is.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.check import check_size, check_text
from vram_conductor.protocol.errors import InvalidArgument, OutOfRange, Unimplemented
from vram_conductor.protocol.plain import is_list, is_map

FEATURE = "structured_output"
"""In WELCOME.features and READY.features: whoever lacks it would answer as if nothing was asked."""


def check_structure(grammar: str | None, json_schema: dict[str, Any] | None) -> None:
    """At most one of both, not empty, within the limits, plain JSON.

    Raises:
        InvalidArgument: ``bad_input`` (both), ``bad_value``.
        OutOfRange: ``limit_exceeded``.
    """
    if grammar is not None and json_schema is not None:
        raise InvalidArgument(
            "bad_input",
            "give a grammar or a json_schema, not both",
            field="grammar",
            value=["grammar", "json_schema"],
        )
    if grammar is not None:
        # A character has at least a byte: a text with fewer bytes passes this, too.
        check_text("grammar", grammar, limits.GRAMMAR_BYTES_MAX, empty=False)
        check_size("grammar", len(grammar.encode()), limits.GRAMMAR_BYTES_MAX, unit="bytes")
    if json_schema is not None:
        _check_plain(json_schema)
        size = len(msgspec.json.encode(json_schema))
        check_size("json_schema", size, limits.GRAMMAR_BYTES_MAX, unit="bytes")


def _check_plain(schema: dict[str, Any]) -> None:
    level: list[Any] = [schema]
    for _ in range(limits.SCHEMA_NESTING_MAX):
        deeper: list[Any] = []
        for item in level:
            if is_map(item) and type(item) is dict:
                if not all(type(key) is str for key in item):
                    raise _not_json("a name is not a text")
                deeper.extend(item.values())
            elif is_list(item) and type(item) is list:
                deeper.extend(item)
            elif type(item) is float and not math.isfinite(item):
                raise _not_json("a number is not finite")
            elif item is not None and type(item) not in (bool, int, float, str):
                raise _not_json(f"a {type(item).__name__} is in it")
        level = deeper
        if not level:
            return
    raise OutOfRange(
        "limit_exceeded",
        f"json_schema is nested deeper than {limits.SCHEMA_NESTING_MAX}; name its parts in $defs",
        field="json_schema",
        limit=limits.SCHEMA_NESTING_MAX,
    )


def _not_json(why: str) -> InvalidArgument:
    return InvalidArgument(
        "bad_value", f"json_schema is not plain JSON: {why}", field="json_schema"
    )


def no_structure(who: str) -> Unimplemented:
    """The error where ``who`` would ignore what was asked for."""
    return Unimplemented(
        "no_structured_output",
        f"{who} is of an older version and would ignore grammar and json_schema; upgrade it",
    )
