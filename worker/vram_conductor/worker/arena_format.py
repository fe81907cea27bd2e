"""Layout of an arena file: one conversation's parked KV state, twice. *Pure.*

::

    page 0   words (uint64, native byte order):
               0 magic "VMCARENA"   1 format version    2 half_bytes   3 xxh3_64 of words 0-2
               4 commit word = seq * 2 + half, 0 = nothing committed yet
               5, 6   bytes of half 0 / half 1 that are really allocated
               8, 9   seal of half 0: seq, xxh3_64 of its payload
               10, 11 seal of half 1
    page 1   descriptor of half 0: length (uint32), pad, xxh3_64 (uint64), msgpack body
    page 2   descriptor of half 1
    then     half 0, half 1 (half_bytes each, a multiple of the page)

A state is written to the half that the commit word does not name; the commit word is written
last, with one aligned 8-byte store. A process killed at any instant therefore leaves the previous
state untouched. The seal is written later, by another thread; a half whose seal does not carry
the sequence number of its descriptor has none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import xxhash

from vram_conductor.protocol.errors import DataLoss, Internal
from vram_conductor.worker.store import ParkedMeta

MAGIC = int.from_bytes(b"VMCARENA", "little")
FORMAT_VERSION = 1
PAGE_BYTES = 4096
HEADER_BYTES = 3 * PAGE_BYTES
_CHUNK_BYTES = 4 * 1024 * 1024
GROW_BYTES = 64 * 1024
"""Halves are allocated in steps of this size."""

WORD_MAGIC, WORD_VERSION, WORD_HALF_BYTES, WORD_STATIC_SUM, WORD_COMMIT = range(5)
WORD_ALLOCATED = (5, 6)
WORD_SEAL_SEQ = (8, 10)
WORD_SEAL_SUM = (9, 11)

_DESCRIPTOR = struct.Struct("=IIQ")
_BODY_BYTES_MAX = PAGE_BYTES - _DESCRIPTOR.size

Half = Literal[0, 1]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """What a half holds; ``seq`` counts the commits of this arena."""

    seq: int
    meta: ParkedMeta


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Descriptor)


@dataclass(frozen=True)
class Held:
    """A committed state as the header tells it; ``seal`` is None while there is no checksum."""

    half: Half
    descriptor: Descriptor
    seal: int | None


def round_up(value: int, step: int) -> int:
    """The smallest multiple of ``step`` that is >= ``value``."""
    return -(-value // step) * step


def half_bytes_for(state_bytes: int) -> int:
    """Capacity of a half that holds a state of ``state_bytes`` (at least one page)."""
    return round_up(max(state_bytes, 1), PAGE_BYTES)


def parked_bytes(state_bytes: int) -> int:
    """What a state of ``state_bytes`` takes when nothing is being written: header and one half."""
    return HEADER_BYTES + round_up(half_bytes_for(state_bytes), GROW_BYTES)


def file_bytes(half_bytes: int) -> int:
    """Length of the file; what it really takes is ``HEADER_BYTES`` + what is allocated."""
    return HEADER_BYTES + 2 * half_bytes


def data_offset(half: Half, half_bytes: int) -> int:
    """Where a half's payload begins."""
    return HEADER_BYTES + half * half_bytes


def static_sum(half_bytes: int) -> int:
    """Checksum of the words that never change."""
    return xxhash.xxh3_64_intdigest(struct.pack("=QQQ", MAGIC, FORMAT_VERSION, half_bytes))


def pack_descriptor(descriptor: Descriptor) -> bytes:
    """Bytes for the start of a descriptor page."""
    body = _encoder.encode(descriptor)
    if len(body) > _BODY_BYTES_MAX:
        raise Internal(
            "arena_header_too_long",
            f"a state's identity takes {len(body)} bytes, the header has {_BODY_BYTES_MAX}",
            header_bytes=len(body),
        )
    return _DESCRIPTOR.pack(len(body), 0, xxhash.xxh3_64_intdigest(body)) + body


def unpack_descriptor(page: bytes) -> Descriptor | None:
    """The descriptor of a page; None where there is none or it is damaged."""
    length, _, checksum = _DESCRIPTOR.unpack_from(page)
    body = page[_DESCRIPTOR.size : _DESCRIPTOR.size + length]
    if not 0 < length <= _BODY_BYTES_MAX or xxhash.xxh3_64_intdigest(body) != checksum:
        return None
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def corrupt(what: str, **numbers: Any) -> DataLoss:
    """The error of every damaged arena."""
    return DataLoss(
        "state_corrupt",
        f"a parked state is damaged ({what}); it is discarded and the conversation re-prefilled",
        **numbers,
    )


def check_words(words: tuple[int, ...], size_bytes: int) -> int:
    """Check page 0 of a file of ``size_bytes``; returns ``half_bytes``.

    Raises:
        DataLoss: ``state_corrupt``.
    """
    if words[WORD_MAGIC] != MAGIC:
        raise corrupt("wrong magic")
    if words[WORD_VERSION] != FORMAT_VERSION:
        raise corrupt("another format version", version=words[WORD_VERSION])
    half_bytes = words[WORD_HALF_BYTES]
    if words[WORD_STATIC_SUM] != static_sum(half_bytes) or half_bytes % PAGE_BYTES:
        raise corrupt("damaged header")
    if size_bytes != file_bytes(half_bytes):
        raise corrupt(
            "its length is not what it says",
            file_bytes=size_bytes,
            expected_bytes=file_bytes(half_bytes),
        )
    if any(words[index] > half_bytes for index in WORD_ALLOCATED):
        raise corrupt("damaged header")
    return half_bytes


def find(words: tuple[int, ...], pages: Sequence[bytes], sealed_only: bool) -> Held | None:
    """The state that the header tells of, None if there is none.

    Args:
        pages: the two descriptor pages.
        sealed_only: a state without a checksum does not count; where the last one has none, the
            one before it may still be whole.

    Raises:
        DataLoss: ``state_corrupt``: the commit word names what is not there.
    """
    commit = words[WORD_COMMIT]
    if commit == 0:
        return None
    seq, last = commit >> 1, commit & 1
    newest = _held(words, last, pages, seq)
    if newest is None:
        raise corrupt("damaged descriptor")
    if not sealed_only or newest.seal is not None:
        return newest
    older = _held(words, 1 - last, pages, seq - 1)
    return older if older is not None and older.seal is not None else None


def _held(words: tuple[int, ...], index: int, pages: Sequence[bytes], seq: int) -> Held | None:
    """The state of a half if it is complete and has this sequence number."""
    half: Half = 1 if index else 0
    descriptor = unpack_descriptor(pages[half])
    if descriptor is None or descriptor.seq != seq:
        return None
    if not 0 <= descriptor.meta.payload_bytes <= words[WORD_ALLOCATED[half]]:
        return None
    sealed = words[WORD_SEAL_SEQ[half]] == seq
    return Held(half, descriptor, words[WORD_SEAL_SUM[half]] if sealed else None)


def payload_sum(payload: memoryview) -> int:
    """xxh3_64 of a payload, in pieces, so that other threads get their turn."""
    state = xxhash.xxh3_64()
    for start in range(0, len(payload), _CHUNK_BYTES):
        state.update(payload[start : start + _CHUNK_BYTES])
    return state.intdigest()
