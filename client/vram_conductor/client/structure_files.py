"""``--grammar FILE`` and ``--json-schema FILE``: what an answer must look like, from files."""

from __future__ import annotations

import json
from pathlib import Path

from vram_conductor.client.requests import DecodeOptions
from vram_conductor.protocol.errors import InvalidArgument


def structure(grammar: Path | None, schema: Path | None) -> DecodeOptions:
    """What is in the files, as options of a job.

    Raises:
        InvalidArgument: ``bad_flags``: both. ``bad_input``: a file that cannot be read, is not
            UTF-8, or (schema) is no JSON object.
    """
    if grammar is not None and schema is not None:
        raise InvalidArgument("bad_flags", "give --grammar or --json-schema, not both")
    if grammar is not None:
        return {"grammar": _read(grammar)}
    if schema is None:
        return {}
    text = _read(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("bad_input", f"{schema} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(
            "bad_input", f"{schema} is a JSON {type(value).__name__}; a schema is an object"
        )
    return {"json_schema": value}


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidArgument("bad_input", f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            "bad_input", f"{path} is not UTF-8 (byte {error.start}); convert it first"
        ) from None
