"""Backups take what is left, and go before a promise suffers."""

from __future__ import annotations

from fake_store import MemoryStore
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.backup import Backups, BackupView, plan_backups, room_bytes
from vram_conductor.worker.hostroom import HostRoom


def view(model: str, size: int = 100, **fields: object) -> BackupView:
    return BackupView(model, size, **fields)  # type: ignore[arg-type]


def test_the_room_is_what_states_leave_with_the_largest_counted_twice() -> None:
    assert room_bytes(1000, []) == 1000
    assert room_bytes(1000, [100, 300]) == 300
    assert room_bytes(500, [100, 300]) == 0


def test_those_used_last_are_backed_up_first() -> None:
    models = [view("old", can=True, used_ns=1), view("new", can=True, used_ns=2)]
    assert plan_backups(199, models) == Backups(add=("new",))
    assert plan_backups(200, models) == Backups(add=("new", "old"))


def test_a_large_one_that_does_not_fit_stops_no_small_one() -> None:
    models = [view("small", 50, can=True, used_ns=1), view("large", 200, can=True, used_ns=2)]
    assert plan_backups(100, models) == Backups(add=("small",))


def test_the_least_recently_used_backup_goes_when_the_room_is_needed() -> None:
    models = [view("old", backed=True, used_ns=1), view("new", backed=True, used_ns=2)]
    assert plan_backups(200, models) == Backups()
    assert plan_backups(199, models) == Backups(drop=("old",))
    assert plan_backups(0, models) == Backups(drop=("old", "new"))
    read = [view("old", backed=True, stays=True, used_ns=1), models[1]]
    assert plan_backups(199, read) == Backups(drop=("new",))


def test_none_goes_for_the_sake_of_another() -> None:
    models = [view("old", backed=True, used_ns=1), view("new", can=True, used_ns=2)]
    assert plan_backups(150, models) == Backups()


@st.composite
def views(draw: st.DrawFn) -> list[BackupView]:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True))
    return [
        BackupView(
            name,
            draw(st.integers(1, 100)),
            backed=draw(st.booleans()),
            can=draw(st.booleans()),
            stays=draw(st.integers(0, 3)) == 0,
            used_ns=draw(st.integers(0, 3)),
        )
        for name in names
    ]


@given(models=views(), room=st.integers(0, 400))
def test_every_decision_keeps_to_the_room(models: list[BackupView], room: int) -> None:
    found = plan_backups(room, models)
    by_name = {item.model: item for item in models}
    left = [item for item in models if item.backed and item.model not in found.drop]
    left += [by_name[name] for name in found.add]
    taken = sum(item.bytes for item in left)
    assert taken <= room or not found.add
    assert taken <= room or all(item.stays for item in left)
    assert not set(found.add) & set(found.drop)
    for name in found.drop:
        # It was needed: with it, and without what is newer, there would have been too much.
        older = [item for item in models if item.backed and item.model != name]
        assert by_name[name].bytes + sum(item.bytes for item in older) > room
    for item in models:
        if item.can and not item.backed and item.model not in found.add:
            assert taken + item.bytes > room


@given(
    beside=st.integers(0, 50),
    capacity=st.integers(0, 50),
    steps=st.lists(st.integers(-30, 30), max_size=20),
)
def test_host_memory_beside_the_store_is_taken_first(
    beside: int, capacity: int, steps: list[int]
) -> None:
    store = MemoryStore(capacity)
    store.beside_bytes = beside
    room = HostRoom(store)
    assert room.capacity_bytes == beside + capacity
    taken = 0
    for step in steps:
        if step >= 0:
            took = room.take(step)
            assert took == (taken + step <= beside + capacity)
            taken += step if took else 0
        else:
            less = min(taken, -step)
            room.give_back(less)
            taken -= less
        assert room.taken_bytes == taken
        assert store.lent_bytes == max(0, taken - beside)
