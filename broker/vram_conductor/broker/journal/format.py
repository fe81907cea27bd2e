"""The journal's bytes (*pure*): a header, then frames that can be found again after damage.

::

    file   = header frame*
    header = "VMCJRNL\\n" u32 version, u32 crc32(the 12 bytes before)
    frame  = mark (4 bytes) u32 length, u32 crc32(length field + payload), payload

All integers are little-endian. The mark has no zero byte and is no UTF-8, so neither token ids
(int32) nor names can contain one: after a damaged frame the next one is found by searching.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import mmap

FORMAT_VERSION = 1
MAGIC = b"VMCJRNL\n"
HEADER_BYTES = 16
MARK = b"\xf5\xd6\xc7\xfa"
FRAME_BYTES = 12
"""Mark, length and checksum in front of every payload."""

PAYLOAD_BYTES_MAX = 64 * 1024 * 1024
"""Above the largest transcript (N_CTX_MAX ids of 4 bytes)."""

_VERSION_CRC = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_LENGTH_CRC = struct.Struct("<II")

Data = bytes | mmap


def header(version: int = FORMAT_VERSION) -> bytes:
    """The first bytes of a journal."""
    start = MAGIC + _LENGTH.pack(version)
    return start + _LENGTH.pack(zlib.crc32(start))


def frame(payload: bytes) -> bytes:
    """One record, ready to be appended.

    Raises:
        ValueError: longer than PAYLOAD_BYTES_MAX.
    """
    if not 0 < len(payload) <= PAYLOAD_BYTES_MAX:
        raise ValueError(f"a record of {len(payload)} bytes; 1 to {PAYLOAD_BYTES_MAX} are possible")
    length = _LENGTH.pack(len(payload))
    crc = zlib.crc32(payload, zlib.crc32(length))
    return b"".join((MARK, length, _LENGTH.pack(crc), payload))


@dataclass(frozen=True, slots=True)
class Header:
    """What the first bytes say: ``good``, ``torn`` (the beginning of a header, or nothing),
    ``newer`` (a later format), ``bad`` (anything else)."""

    state: str
    version: int = 0


def read_header(data: Data) -> Header:
    """Judge the header of a file."""
    head = bytes(data[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        return Header("torn" if header().startswith(head) else "bad")
    version, crc = _VERSION_CRC.unpack_from(head, len(MAGIC))
    if not head.startswith(MAGIC) or crc != zlib.crc32(head[:12]):
        return Header("bad")
    return Header("newer" if version > FORMAT_VERSION else "good", version)


@dataclass(frozen=True, slots=True)
class Payload:
    """An intact record: ``data[start:end]`` is the payload."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Hole:
    """Damage in ``data[start:end]`` with an intact record right behind it."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Torn:
    """Nothing intact from ``start`` to the end: a write that was cut off."""

    start: int


def scan(data: Data, start: int = HEADER_BYTES) -> Iterator[Payload | Hole | Torn]:
    """Everything behind the header, in order. At most one ``Torn``, and that comes last."""
    at, size = start, len(data)
    while at < size:
        end = _intact(data, at, size)
        if end:
            yield Payload(at + FRAME_BYTES, end)
            at = end
            continue
        following = _next_intact(data, at + 1, size)
        if following < 0:
            yield Torn(at)
            return
        yield Hole(at, following)
        at = following


def _intact(data: Data, at: int, size: int) -> int:
    """End of the intact frame at ``at``, 0 if there is none."""
    if at + FRAME_BYTES > size or data[at : at + 4] != MARK:
        return 0
    length, crc = _LENGTH_CRC.unpack_from(data, at + 4)
    end = int(at + FRAME_BYTES + length)
    if not 0 < length <= PAYLOAD_BYTES_MAX or end > size:
        return 0
    # A view keeps large payloads from being copied; it must be gone before a mmap closes.
    with memoryview(data) as view:
        intact = zlib.crc32(view[at + FRAME_BYTES : end], zlib.crc32(view[at + 4 : at + 8])) == crc
    return end if intact else 0


def _next_intact(data: Data, at: int, size: int) -> int:
    """Offset of the first intact frame at or behind ``at``, -1 if there is none."""
    found = data.find(MARK, at)
    while found >= 0 and not _intact(data, found, size):
        found = data.find(MARK, found + 1)
    return found
