"""How a wake shares the way to the device: what may be asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.vmm import pace
from vram_conductor.worker.vmm.pace import LEAST_PIECE_BYTES, PIECE_VARIABLE, piece_bytes

BACKUP = Path(pace.__file__).with_name("backup.c").read_text()


def test_without_a_wish_it_is_what_the_library_is_made_for() -> None:
    assert piece_bytes({}) == piece_bytes({PIECE_VARIABLE: ""}) == pace.PIECE_BYTES
    found = re.search(r"define PIECE \(\(size_t\)(\d+) << 20\)", BACKUP)
    assert found
    assert int(found[1]) << 20 == pace.PIECE_BYTES
    assert f"define GIVE_WAY_NS {pace.GIVE_WAY_NS}u" in BACKUP


@given(st.integers(LEAST_PIECE_BYTES, 10**14) | st.just(0))
def test_a_size_is_taken(size: int) -> None:
    assert piece_bytes({PIECE_VARIABLE: str(size)}) == size


@given(
    st.text(min_size=1).filter(lambda text: not (text.isascii() and text.isdigit()))
    | st.integers(1, LEAST_PIECE_BYTES - 1).map(str)
    | st.integers(10**15).map(str)
    | st.sampled_from(["-1", "8M", "1e6", "0x10000", "٦٥٥٣٦", "8.5"])
)
def test_anything_else_is_refused_with_what_is_possible(given_text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"at least {LEAST_PIECE_BYTES}") as caught:
        piece_bytes({PIECE_VARIABLE: given_text})
    assert caught.value.reason == "bad_config"
    assert PIECE_VARIABLE in caught.value.info.message
