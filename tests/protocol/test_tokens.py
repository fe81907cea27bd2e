"""Token ids as raw little-endian int32 buffers."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.tokens import pack_tokens, unpack_tokens


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_round_trip_in_the_documented_format(tokens: list[int]) -> None:
    raw = pack_tokens(tokens)
    assert raw == struct.pack(f"<{len(tokens)}i", *tokens)
    assert unpack_tokens(raw) == tokens


@pytest.mark.parametrize("tokens", [[-1], [0, -(2**31)], [2**31], [-(2**40)]])
def test_ids_outside_31_bits_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pack_tokens(tokens)
    assert caught.value.reason == "bad_tokens"


@pytest.mark.parametrize("raw", [b"\0", b"\0" * 5, b"\xff" * 4, b"\0\0\0\0\0\0\0\x80"])
def test_bad_buffers_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        unpack_tokens(raw)
    assert caught.value.reason == "bad_tokens"
