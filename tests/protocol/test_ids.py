"""Request ids, epochs and body digests."""

import uuid

import pytest

from vram_conductor.protocol import ids
from vram_conductor.protocol.messages import Decode, Reset
from vram_conductor.protocol.values import Message, Sampling


def test_rid_is_a_uuid_of_version_7_that_holds_the_time() -> None:
    made = uuid.UUID(bytes=ids.make_rid(1_700_000_000_123, b"\xff" * 10))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == 1_700_000_000_123


def test_rid_of_the_example_in_the_standard() -> None:
    # RFC 9562, appendix A.6: unix_ts_ms 0x017F22E279B0, rand_a 0xCC3, rand_b 0x18C4DC0C0C07398F.
    random = bytes.fromhex("0cc318c4dc0c0c07398f")
    expected = uuid.UUID("017f22e2-79b0-7cc3-98c4-dc0c0c07398f")
    assert ids.make_rid(0x017F22E279B0, random) == expected.bytes


def test_rids_sort_by_time() -> None:
    made = [ids.make_rid(ms, b"\xff" * 10) for ms in (1, 2, 255, 256, 2**47)]
    assert made == sorted(made)


@pytest.mark.parametrize(("ms", "random"), [(0, b"x" * 9), (-1, b"x" * 10), (1 << 48, b"x" * 10)])
def test_rid_refuses_what_does_not_fit(ms: int, random: bytes) -> None:
    with pytest.raises(ValueError, match=r"random bytes|48-bit"):
        ids.make_rid(ms, random)


def test_fresh_rids_differ() -> None:
    made = {ids.new_rid() for _ in range(1000)}
    assert len(made) == 1000
    assert {len(rid) for rid in made} == {16}


def test_epoch_never_goes_back() -> None:
    assert ids.next_epoch(100) == 100
    assert ids.next_epoch(100, highest_seen=200) == 201
    assert ids.next_epoch(200, highest_seen=200) == 201
    assert ids.next_epoch(300, highest_seen=200) == 300


def test_body_digest_ignores_rid_and_window_only() -> None:
    base = Decode(rid=b"a" * 16, agent="coder", prompt="hi")
    digest = ids.body_digest(base)
    assert len(digest) == 16
    assert ids.body_digest(Decode(rid=b"b" * 16, agent="coder", prompt="hi", window=3)) == digest
    others = [
        Decode(rid=b"a" * 16, agent="coder", prompt="hi!"),
        Decode(rid=b"a" * 16, agent="coder", prompt="hi", continue_=True),
        Decode(rid=b"a" * 16, agent="coder", prompt="hi", sampling=Sampling(seed=1)),
        Decode(rid=b"a" * 16, agent="coder", messages=[Message("user", "hi")]),
    ]
    assert digest not in {ids.body_digest(other) for other in others}


def test_body_digest_tells_message_types_apart() -> None:
    reset = Reset(rid=b"a" * 16, agent="coder")
    assert ids.body_digest(reset) != ids.body_digest(Decode(rid=b"a" * 16, agent="coder"))
