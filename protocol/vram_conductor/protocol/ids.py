"""Identifiers: request ids, epochs, body digests.

A ``rid`` is any 16 bytes; ours are UUIDv7 (RFC 9562, section 5.7), so they sort by time. An
epoch is the nanosecond clock at a process's start, pushed up so that it never goes back.
"""

from __future__ import annotations

import hashlib
import os
import time

import msgspec


def make_rid(unix_ms: int, random: bytes) -> bytes:
    """A UUIDv7: 48 bits of ``unix_ms``, version, variant, 74 bits taken from 10 random bytes.

    Pure. Raises ValueError for ``random`` of another length than 10.
    """
    raise NotImplementedError


def new_rid() -> bytes:
    """A fresh request id: 16 bytes."""
    return make_rid(time.time_ns() // 1_000_000, os.urandom(10))


def next_epoch(now_ns: int, highest_seen: int = 0) -> int:
    """An epoch above every earlier one, even when the clock went back. Pure."""
    return max(now_ns, highest_seen + 1)


def body_digest(message: msgspec.Struct) -> bytes:
    """16 bytes that are equal for equal requests: over every field but ``rid`` and ``window``.

    Same rid and same digest: the same request again (re-attach). Same rid and another digest:
    ALREADY_EXISTS. Pure.
    """
    raise NotImplementedError


__all__ = ["body_digest", "hashlib", "make_rid", "new_rid", "next_epoch"]
