"""Frames ⇄ typed messages. The only place where bytes from outside are decoded.

A message is ``[preamble][one msgpack map][raw buffer …]`` (SPEC.md, "Frames"). Whatever bytes
come in, only InvalidArgument or Unimplemented come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from vram_conductor.protocol import commands, limits, messages
from vram_conductor.protocol.errors import (
    ConductorError,
    ErrorInfo,
    InvalidArgument,
    OutOfRange,
    Unimplemented,
)
from vram_conductor.protocol.plain import is_map

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()
_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SAID_CHARS_MAX = 200
# Deeply nested containers raise RecursionError, which is no ValueError.
_REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)


class _Envelope(msgspec.Struct):
    """Just the request id of any message, whatever else is in it."""

    rid: bytes = b""


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


class Codec(Generic[M]):
    """Encodes any message, decodes one direction's union of messages."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: msgspec.Struct, raw: Sequence[bytes] = ()) -> list[bytes]:
        """Frames of ``message``, ready for ``send_multipart``.

        Raises:
            InvalidArgument: ``unencodable``: half a surrogate pair, an int beyond 64 bits …
            OutOfRange: ``message_too_large``: the map or a raw buffer exceeds its limit.
        """
        try:
            body = _encoder.encode(message)
        except (*_REFUSED, TypeError, OverflowError) as error:
            raise InvalidArgument(
                "unencodable", f"this message cannot be written as msgpack: {_said(error)}"
            ) from None
        _check_size("map", len(body), limits.MAP_BYTES_MAX)
        for buffer in raw:
            _check_size("raw buffer", len(buffer), limits.FRAME_BYTES_MAX)
        return [limits.PREAMBLE, body, *raw]

    def decode(self, frames: Sequence[bytes]) -> tuple[M, list[bytes]]:
        """The message and its raw buffers.

        Raises:
            InvalidArgument: ``bad_frames``, ``bad_preamble`` or ``bad_message``.
            Unimplemented: ``unsupported_version``: the peer speaks another major version.
        """
        _check_frames(frames)
        try:
            message = self._decoder.decode(frames[1])
        except _REFUSED as error:
            raise _bad_message(_said(error)) from None
        _check_free_form(message)
        declared = getattr(message, "n_raw", 0)
        if declared != len(frames) - 2:
            raise InvalidArgument(
                "bad_frames",
                f"the map declares {declared} raw buffers, {len(frames) - 2} follow",
                declared=declared,
                raw=len(frames) - 2,
            )
        return message, list(frames[2:])


def peek_rid(frames: Sequence[bytes]) -> bytes:
    """The request id of a message that ``decode`` refused, so that its sender can be answered.

    Empty if there is none to be found.
    """
    try:
        _check_frames(frames)
        rid = _envelope_decoder.decode(frames[1]).rid
    except (*_REFUSED, ConductorError):
        return b""
    return rid if len(rid) == limits.RID_BYTES else b""


def _check_frames(frames: Sequence[bytes]) -> None:
    if not 2 <= len(frames) <= limits.FRAMES_MAX:
        raise InvalidArgument(
            "bad_frames",
            f"a message has 2 to {limits.FRAMES_MAX} frames, this one has {len(frames)}",
            frames=len(frames),
        )
    if frames[0] != limits.PREAMBLE:
        raise _bad_preamble(frames[0])
    for index, frame in enumerate(frames):
        most = limits.MAP_BYTES_MAX if index == 1 else limits.FRAME_BYTES_MAX
        if len(frame) > most:
            raise InvalidArgument(
                "bad_frames",
                f"frame {index} has {len(frame)} bytes, the limit is {most}",
                frame=index,
                frame_bytes=len(frame),
                limit=most,
            )


def _bad_preamble(preamble: bytes) -> ConductorError:
    if len(preamble) == len(limits.PREAMBLE) and preamble[:3] == limits.PREAMBLE[:3]:
        return Unimplemented(
            "unsupported_version",
            f"the peer speaks protocol {preamble[3]}, this side speaks "
            f"{limits.PROTOCOL_MAJOR}; upgrade the older one",
            theirs=preamble[3],
            ours=limits.PROTOCOL_MAJOR,
        )
    return InvalidArgument("bad_preamble", "not a VRAM Conductor message")


def _check_free_form(message: Any) -> None:
    """``body`` and ``details`` have no schema: hold them to plain values of modest depth."""
    body = getattr(message, "body", None)
    if body:
        _check_plain(body)
    error = getattr(message, "error", None)
    if isinstance(error, ErrorInfo) and error.details:
        _check_plain(error.details)


def _check_plain(value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(limits.NESTING_MAX):
        deeper: list[Any] = []
        for container in level:
            if is_map(container):
                if not all(type(key) is str for key in container):
                    raise _bad_message("map keys are strings")
                deeper.extend(container.values())
            else:
                deeper.extend(container)
        level = []
        for item in deeper:
            if type(item) in (dict, list):
                level.append(item)
            elif type(item) not in _PLAIN:
                raise _bad_message("msgpack extension types are not used here")
        if not level:
            return
    raise _bad_message(f"containers are nested deeper than {limits.NESTING_MAX}")


def _check_size(what: str, size_bytes: int, limit: int) -> None:
    if size_bytes > limit:
        raise OutOfRange(
            "message_too_large",
            f"the {what} has {size_bytes} bytes, the limit is {limit}; send less at once",
            value=size_bytes,
            limit=limit,
        )


def _bad_message(why: str) -> InvalidArgument:
    return InvalidArgument("bad_message", f"undecodable message: {why}")


def _said(error: BaseException) -> str:
    """What a library says may quote the peer at any length."""
    said = str(error)
    return said if len(said) <= _SAID_CHARS_MAX else said[:_SAID_CHARS_MAX] + "…"


CLIENT_TO_BROKER: Codec[messages.ClientMessage] = Codec(messages.ClientMessage)
BROKER_TO_CLIENT: Codec[messages.BrokerMessage] = Codec(messages.BrokerMessage)
BROKER_TO_WORKER: Codec[commands.ToWorker] = Codec(commands.ToWorker)
WORKER_TO_BROKER: Codec[commands.FromWorker] = Codec(commands.FromWorker)
