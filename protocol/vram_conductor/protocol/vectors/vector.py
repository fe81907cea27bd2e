"""One vector and its form in JSON. *Pure.*

JSON has no bytes: ``{"$bytes": "00ff"}`` stands for a msgpack bin, ``{"$float": "nan"}`` for a
float that JSON lacks.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from vram_conductor.protocol import codec, validate
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.plain import is_array, is_list, is_map

Direction = Literal["client_to_broker", "broker_to_client", "broker_to_worker", "worker_to_broker"]

CODECS: dict[Direction, codec.Codec[Any]] = {
    "client_to_broker": codec.CLIENT_TO_BROKER,
    "broker_to_client": codec.BROKER_TO_CLIENT,
    "broker_to_worker": codec.BROKER_TO_WORKER,
    "worker_to_broker": codec.WORKER_TO_BROKER,
}


@dataclass(frozen=True)
class Vector:
    """Frames and what a receiver makes of them.

    Attributes:
        name: unique within its file.
        direction: which union of messages the receiver expects.
        frames: as on the wire, without a routing id.
        canonical: our own sender would write these very bytes.
        note: why the vector exists.
    """

    name: str
    direction: Direction
    frames: list[bytes] = field(repr=False)
    canonical: bool = True
    note: str = ""


def verdict(vector: Vector) -> ConductorError | None:
    """What a broker (or whoever receives this direction) says: None, or the error."""
    try:
        message, _ = CODECS[vector.direction].decode(vector.frames)
        if vector.direction == "client_to_broker":
            validate.check(message)
    except ConductorError as error:
        return error
    return None


def to_json(vector: Vector) -> dict[str, Any]:
    """The vector's entry in its file."""
    error = verdict(vector)
    entry: dict[str, Any] = {
        "name": vector.name,
        "direction": vector.direction,
        "frames_hex": [frame.hex() for frame in vector.frames],
        "json": _map_of(vector.frames),
        "ok": error is None,
    }
    if error is None:
        entry["canonical"] = vector.canonical
    else:
        entry |= {"error_code": str(error.info.code), "reason": error.reason}
    if vector.note:
        entry["note"] = vector.note
    return entry


def plain(value: Any) -> Any:
    """A msgpack value as JSON; see the module's docstring."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if is_map(value):
        return {str(key): plain(item) for key, item in value.items()}
    if is_array(value):
        return [plain(item) for item in value]
    return value


def unplain(value: Any) -> Any:
    """The msgpack value that ``plain`` made this of."""
    if is_map(value):
        if value.keys() == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {key: unplain(item) for key, item in value.items()}
    if is_list(value):
        return [unplain(item) for item in value]
    return value


def _map_of(frames: list[bytes]) -> Any:
    """The map for people to read; None where there is none, or JSON cannot hold it."""
    try:
        value = msgspec.msgpack.decode(frames[1])
        shown = plain(value)
        json.dumps(shown)
        same = msgspec.msgpack.encode(unplain(shown)) == msgspec.msgpack.encode(value)
    except (IndexError, msgspec.MsgspecError, ValueError, RecursionError, TypeError):
        return None
    return shown if same else None
