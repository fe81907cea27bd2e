"""Deadlines: re-armed, cancelled, in order, without growing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.broker.timers import Timers


def test_due_in_order_and_only_once() -> None:
    timers = Timers()
    for name, at_ns in (("late", 30), ("early", 10), ("middle", 20)):
        timers.set((name, 0), at_ns)
    assert timers.next_ns() == 10
    assert [what for what, _ in timers.due(20)] == ["early", "middle"]
    assert list(timers.due(20)) == []
    assert timers.next_ns() == 30


def test_rearming_and_cancelling_forget_the_old_moment() -> None:
    timers = Timers()
    timers.set(("a", 1), 10)
    timers.set(("a", 1), 50)
    timers.set(("b", 1), 20)
    timers.cancel(("b", 1))
    timers.cancel(("never", 1))
    assert timers.next_ns() == 50
    assert list(timers.due(40)) == []
    timers.set(("a", 1), 5)
    assert list(timers.due(5)) == [("a", 1)]
    assert timers.next_ns() is None


def test_rearming_for_ever_takes_no_memory() -> None:
    timers = Timers()
    for at_ns in range(10_000):
        timers.set(("a", 1), at_ns)
    assert len(timers._heap) < 100


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "cancel", "due"]), st.integers(0, 4), st.integers(0, 50)),
        max_size=60,
    )
)
def test_agrees_with_a_plain_table(steps: list[tuple[str, int, int]]) -> None:
    timers = Timers()
    table: dict[int, int] = {}
    for what, key, at_ns in steps:
        match what:
            case "set":
                timers.set(("t", key), at_ns)
                table[key] = at_ns
            case "cancel":
                timers.cancel(("t", key))
                table.pop(key, None)
            case _:
                expected = {key for key, due_ns in table.items() if due_ns <= at_ns}
                assert {key for _, key in timers.due(at_ns)} == expected
                for gone in expected:
                    del table[gone]
        assert timers.next_ns() == min(table.values(), default=None)
        assert len(timers) == len(table)
