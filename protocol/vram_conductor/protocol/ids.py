"""Identifiers: request ids, epochs, body digests.

A ``rid`` is any 16 bytes; ours are UUIDv7 (RFC 9562, section 5.7), so they sort by time. An
epoch is the nanosecond clock at a process's start, pushed up so that it never goes back.
Only ``new_rid`` reads a clock and a random source; the rest is pure.
"""

from __future__ import annotations

import hashlib
import os
import time

import msgspec

_RANDOM_BYTES = 10
_NOT_THE_REQUEST = ("rid", "window")


def make_rid(unix_ms: int, random: bytes) -> bytes:
    """A UUIDv7: 48 bits of ``unix_ms``, version, variant, and 74 bits of 10 random bytes.

    Raises:
        ValueError: ``random`` has another length than 10, or ``unix_ms`` needs over 48 bits.
    """
    if len(random) != _RANDOM_BYTES:
        raise ValueError(f"a UUIDv7 takes {_RANDOM_BYTES} random bytes, not {len(random)}")
    if not 0 <= unix_ms < 1 << 48:
        raise ValueError(f"{unix_ms} is no 48-bit count of milliseconds")
    tail = bytearray(random)
    tail[0] = 0x70 | (tail[0] & 0x0F)
    tail[2] = 0x80 | (tail[2] & 0x3F)
    return unix_ms.to_bytes(6, "big") + bytes(tail)


def new_rid() -> bytes:
    """A fresh request id: 16 bytes."""
    return make_rid(time.time_ns() // 1_000_000, os.urandom(_RANDOM_BYTES))


def next_epoch(now_ns: int, highest_seen: int = 0) -> int:
    """An epoch above every earlier one, even when the clock went back."""
    return max(now_ns, highest_seen + 1)


def body_digest(message: msgspec.Struct) -> bytes:
    """16 bytes that are equal for equal requests: over every field but ``rid`` and ``window``.

    Same rid and same digest: the same request again, so re-attach it. Same rid and another
    digest: ALREADY_EXISTS. ``window`` is left out because it speaks of the connection, not of
    the job.
    """
    fields = msgspec.structs.asdict(message)
    for name in _NOT_THE_REQUEST:
        fields.pop(name, None)
    body = msgspec.msgpack.encode([type(message).__name__, fields])
    return hashlib.blake2b(body, digest_size=16).digest()
