"""Waiting messages: in order, bounded for one and for all, dropped when nothing moves."""

from __future__ import annotations

import random

from vram_conductor.broker.shell.outbox import STALL_NS, Outbox, cost_bytes


def message(number: int, size: int = 10) -> list[bytes]:
    return [number.to_bytes(4, "little"), b"x" * size]


def test_messages_leave_in_order() -> None:
    box = Outbox()
    for number in range(5):
        assert box.push(b"a", message(number), 0) == []
    assert b"a" in box
    for number in range(5):
        assert box.first(b"a") == message(number)
        box.sent(b"a", 1)
    assert b"a" not in box
    assert (box.bytes, len(box), box.first(b"a")) == (0, 0, None)


def test_a_peer_too_far_behind_is_dropped_alone() -> None:
    box = Outbox(peer_bytes_max=1_000)
    box.push(b"other", message(0), 0)
    dropped: list[bytes] = []
    for number in range(100):
        dropped += box.push(b"slow", message(number, 100), 0)
        if dropped:
            break
    assert dropped == [b"slow"]
    assert box.peers() == [b"other"]
    assert box.bytes == cost_bytes(message(0))


def test_one_message_larger_than_the_bound_is_still_delivered() -> None:
    box = Outbox(peer_bytes_max=1_000)
    assert box.push(b"a", message(0, 5_000), 0) == []
    assert box.push(b"a", message(1), 0) == [b"a"]


def test_all_together_are_bounded_by_dropping_the_largest() -> None:
    rng = random.Random(3)
    box = Outbox(peer_bytes_max=50_000, total_bytes_max=100_000)
    sizes: dict[bytes, int] = {}
    for number in range(5_000):
        peer = bytes([rng.randrange(20)])
        frames = message(number, rng.randrange(500))
        before = dict(sizes)
        sizes[peer] = sizes.get(peer, 0) + cost_bytes(frames)
        for victim in box.push(peer, frames, 0):
            assert sizes[victim] == max(sizes.values()) or before.get(victim, 0) > 49_000
            del sizes[victim]
        assert box.bytes == sum(sizes.values()) <= 100_000
        assert set(box.peers()) == set(sizes)


def test_a_peer_that_takes_nothing_is_stalled_and_one_that_takes_a_little_is_not() -> None:
    box = Outbox()
    for number in range(3):
        box.push(b"a", message(number), number)
        box.push(b"b", message(number), number)
    box.sent(b"b", STALL_NS)
    assert box.stalled(b"a", STALL_NS + 1)
    assert not box.stalled(b"b", STALL_NS + 1)
    assert not box.stalled(b"nobody", STALL_NS + 1)
    box.forget(b"a")
    box.forget(b"a")
    assert not box.stalled(b"a", 10 * STALL_NS)
