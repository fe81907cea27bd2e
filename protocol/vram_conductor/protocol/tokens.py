"""Token ids as raw buffers: little-endian int32, the format of every raw frame. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterable


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Ids → 4 bytes each, little-endian.

    Raises:
        InvalidArgument: ``bad_tokens``: an id is outside int32.
    """
    raise NotImplementedError


def unpack_tokens(raw: bytes) -> list[int]:
    """The ids of a raw buffer.

    Raises:
        InvalidArgument: ``bad_tokens``: the length is no multiple of 4, or an id is negative.
    """
    raise NotImplementedError
