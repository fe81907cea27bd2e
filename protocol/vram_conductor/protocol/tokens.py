"""Token ids as raw buffers: little-endian int32, the format of every raw frame. *Pure.*"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

from vram_conductor.protocol.errors import InvalidArgument

_ITEM_BYTES = 4
_SWAP = sys.byteorder != "little"


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Ids → 4 bytes each, little-endian.

    Raises:
        InvalidArgument: ``bad_tokens``: an id is negative or beyond int32.
    """
    try:
        ids = array("i", tokens)
    except OverflowError:
        raise InvalidArgument("bad_tokens", "a token id does not fit into 31 bits") from None
    return _checked(ids, swap=_SWAP).tobytes()


def unpack_tokens(raw: bytes) -> list[int]:
    """The ids of a raw buffer.

    Raises:
        InvalidArgument: ``bad_tokens``: the length is no multiple of 4, or an id is negative.
    """
    if len(raw) % _ITEM_BYTES:
        raise InvalidArgument(
            "bad_tokens",
            f"a token buffer holds int32 values, {len(raw)} bytes are no multiple of 4",
            raw_bytes=len(raw),
        )
    ids = array("i")
    ids.frombytes(raw)
    if _SWAP:
        ids.byteswap()
    return _checked(ids).tolist()


def _checked(ids: array[int], *, swap: bool = False) -> array[int]:
    if ids and min(ids) < 0:
        raise InvalidArgument("bad_tokens", f"token ids are >= 0, one is {min(ids)}", id=min(ids))
    if swap:
        ids.byteswap()
    return ids
