"""Frames ⇄ typed messages. The only place where bytes from outside are decoded.

A message is ``[preamble][one msgpack map][raw buffer …]`` (SPEC.md, "Frames").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from vram_conductor.protocol import commands, limits, messages
from vram_conductor.protocol.errors import InvalidArgument, Unimplemented

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


class Codec(Generic[M]):
    """Encodes any message, decodes one direction's union of messages."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)

    def encode(self, message: msgspec.Struct, raw: Sequence[bytes] = ()) -> list[bytes]:
        """Frames of ``message``, ready for ``send_multipart``."""
        return [limits.PREAMBLE, _encoder.encode(message), *raw]

    def decode(self, frames: Sequence[bytes]) -> tuple[M, list[bytes]]:
        """The message and its raw buffers.

        Raises:
            InvalidArgument: ``bad_frames``, ``bad_preamble`` or ``bad_message``.
            Unimplemented: ``unsupported_version``: the peer speaks another major version.
        """
        if not 2 <= len(frames) <= limits.FRAMES_MAX:
            raise InvalidArgument(
                "bad_frames",
                f"a message has 2 to {limits.FRAMES_MAX} frames, this one has {len(frames)}",
                frames=len(frames),
            )
        preamble = frames[0]
        if preamble != limits.PREAMBLE:
            if len(preamble) == 4 and preamble[:3] == limits.PREAMBLE[:3]:
                raise Unimplemented(
                    "unsupported_version",
                    f"peer speaks protocol {preamble[3]}, this side speaks "
                    f"{limits.PROTOCOL_MAJOR}; upgrade the older one",
                    theirs=preamble[3],
                    ours=limits.PROTOCOL_MAJOR,
                )
            raise InvalidArgument("bad_preamble", "not a VRAM Conductor message")
        if len(frames[1]) > limits.MAP_BYTES_MAX:
            raise InvalidArgument(
                "bad_message",
                f"the map has {len(frames[1])} bytes, the limit is {limits.MAP_BYTES_MAX}",
                map_bytes=len(frames[1]),
            )
        try:
            return self._decoder.decode(frames[1]), list(frames[2:])
        # Deeply nested containers raise RecursionError, which is no ValueError.
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidArgument("bad_message", f"undecodable message: {error}") from None


CLIENT_TO_BROKER: Codec[messages.ClientMessage] = Codec(messages.ClientMessage)
BROKER_TO_CLIENT: Codec[messages.BrokerMessage] = Codec(messages.BrokerMessage)
BROKER_TO_WORKER: Codec[commands.ToWorker] = Codec(commands.ToWorker)
WORKER_TO_BROKER: Codec[commands.FromWorker] = Codec(commands.FromWorker)
