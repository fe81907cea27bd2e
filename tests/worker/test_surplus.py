"""Which parked states make room for another one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.values import AgentKey, ConversationKey
from vram_conductor.worker.surplus import short_bytes, victims

A, B = AgentKey("p", "a"), AgentKey("p", "b")


def key(name: str) -> ConversationKey:
    return ConversationKey("p", name[0], name[1:] or "main")


def chosen(writer: str, need: int, parked: str, short: int) -> list[str]:
    """``parked``: ``name=bytes …``, least recently used first. A and B were promised 100 each."""
    states = [(key(name), int(size)) for name, size in (x.split("=") for x in parked.split())]
    found = victims(key(writer), need, states, {A: 100, B: 100}, short)
    names = {key(name): name for name in (x.split("=")[0] for x in parked.split())}
    return [names[item] for item in found]


@pytest.mark.parametrize(
    ("writer", "need", "parked", "short", "expected"),
    [
        # Another agent's surplus, the oldest first; its most recent states are within its promise.
        ("b", 90, "a1=60 a2=60 a3=60", 50, ["a1"]),
        ("b", 90, "a1=60 a2=60 a3=60", 70, ["a1", "a2"]),
        # What cannot free enough stays.
        ("b", 90, "a1=60 a2=60 a3=60", 121, []),
        ("b", 90, "a1=90", 1, []),
        # Its own surplus goes before anybody else's, however old that is.
        ("b", 90, "a1=60 a2=60 b1=60", 50, ["b1"]),
        ("b", 90, "a1=60 a2=60 b1=60", 70, ["b1", "a1"]),
        # Its own other states within its promise go last.
        ("b", 30, "b1=60 a1=60 a2=60", 50, ["a1"]),
        ("b", 30, "b1=60 a1=60 a2=60", 70, ["b1", "a1"]),
        ("b", 30, "b1=60 a1=60", 50, ["b1"]),
        # The state that is being replaced stays.
        ("b", 90, "b=90", 10, []),
        # Nobody was promised what belongs to no admitted agent.
        ("b", 90, "c1=20 a1=90", 20, ["c1"]),
        # Small ones are spared where a large one was needed anyway.
        ("b", 90, "a1=20 a2=70 a3=90", 60, ["a2"]),
    ],
)
def test_who_makes_room(
    writer: str, need: int, parked: str, short: int, expected: list[str]
) -> None:
    assert sorted(chosen(writer, need, parked, short)) == sorted(expected)


@given(
    states=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 100)),
        max_size=12,
        unique_by=lambda state: state[:2],
    ),
    need=st.integers(1, 100),
    short=st.integers(1, 300),
)
def test_nobody_loses_what_was_promised(
    states: list[tuple[str, int, int]], need: int, short: int
) -> None:
    parked = [(key(f"{agent}{n}"), size) for agent, n, size in states]
    gone = victims(key("b0"), need, parked, {A: 100, B: 100}, short)
    sizes = dict(parked)
    freed = sum(sizes[item] for item in gone)
    assert gone == [] or freed >= short
    assert all(freed - sizes[item] < short for item in gone)
    assert key("b0") not in gone
    # Of A, only states beyond those that fit into its promise, most recent first.
    left = 100
    for item, size in reversed(parked):
        if item.agent_key == A and size <= left:
            left -= size
            assert item not in gone


def test_the_shortage_is_what_the_error_says() -> None:
    assert short_bytes({"need_bytes": 30, "used_bytes": 90, "capacity_bytes": 100}) == 20
    assert short_bytes({"need_bytes": 30, "free_bytes": 12}) == 18
    assert short_bytes({"need_bytes": 30, "free_bytes": 40}) == 1
