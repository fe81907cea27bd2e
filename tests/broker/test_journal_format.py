"""The journal's bytes: every cut and every flipped bit is noticed, and costs only what it hit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.broker.journal.format import (
    FORMAT_VERSION,
    FRAME_BYTES,
    HEADER_BYTES,
    MARK,
    Hole,
    Payload,
    Torn,
    frame,
    header,
    read_header,
    scan,
)

PAYLOADS = [b"a", b"second record", bytes(range(256)), b"x" * 40]


def journal(payloads: list[bytes]) -> bytes:
    return header() + b"".join(map(frame, payloads))


def intact(data: bytes) -> list[bytes]:
    return [data[item.start : item.end] for item in scan(data) if isinstance(item, Payload)]


def test_what_is_framed_is_found_again() -> None:
    assert intact(journal(PAYLOADS)) == PAYLOADS


def test_every_cut_keeps_the_whole_records_and_reports_the_rest_as_torn() -> None:
    data = journal(PAYLOADS)
    ends = [HEADER_BYTES]
    for payload in PAYLOADS:
        ends.append(ends[-1] + FRAME_BYTES + len(payload))
    for cut in range(HEADER_BYTES, len(data)):
        whole = sum(end <= cut for end in ends) - 1
        items = list(scan(data[:cut]))
        assert intact(data[:cut]) == PAYLOADS[:whole]
        if cut in ends:
            assert len(items) == whole
        else:
            assert items[-1] == Torn(ends[whole])
        assert not any(isinstance(item, Hole) for item in items)


def test_every_flipped_bit_costs_exactly_its_record() -> None:
    data = journal(PAYLOADS)
    start = HEADER_BYTES
    for number, payload in enumerate(PAYLOADS):
        end = start + FRAME_BYTES + len(payload)
        others = PAYLOADS[:number] + PAYLOADS[number + 1 :]
        for at in range(start, end):
            for bit in range(8):
                bad = bytearray(data)
                bad[at] ^= 1 << bit
                items = list(scan(bytes(bad)))
                assert intact(bytes(bad)) == others
                damage = [item for item in items if not isinstance(item, Payload)]
                last = number == len(PAYLOADS) - 1
                assert damage == [Torn(start) if last else Hole(start, end)]
        start = end


def test_every_flipped_bit_of_the_header_is_noticed() -> None:
    for at in range(HEADER_BYTES):
        for bit in range(8):
            bad = bytearray(header())
            bad[at] ^= 1 << bit
            assert read_header(bytes(bad)).state == "bad"


def test_headers_are_told_apart() -> None:
    assert read_header(header()).state == "good"
    assert read_header(header(FORMAT_VERSION + 1)).state == "newer"
    assert read_header(b"# a text file, not a journal").state == "bad"
    for cut in range(HEADER_BYTES):
        assert read_header(header()[:cut]).state == "torn"
    assert read_header(b"short").state == "bad"


@given(st.lists(st.integers(-(2**31), 2**24)), st.text(max_size=64), st.integers(0, 3))
def test_the_mark_occurs_in_no_ids_and_no_text(ids: list[int], text: str, shift: int) -> None:
    packed = b"".join(i.to_bytes(4, "little", signed=True) for i in ids if i >= 0)
    assert MARK not in packed[shift:]
    assert MARK not in text.encode()


@given(st.lists(st.binary(min_size=1, max_size=50)), st.binary(max_size=200))
def test_garbage_behind_intact_records_never_hides_them(
    payloads: list[bytes], garbage: bytes
) -> None:
    assert intact(journal(payloads) + garbage)[: len(payloads)] == payloads


@pytest.mark.parametrize("size", [0, 64 * 1024 * 1024 + 1])
def test_a_record_outside_the_bounds_is_our_own_bug(size: int) -> None:
    with pytest.raises(ValueError, match="a record of"):
        frame(bytes(size))
