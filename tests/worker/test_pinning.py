"""Pinned arenas: never a hole or an unmapped page, never a view that is pinned in part."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_pinner import FakePinner
from small_tmpfs import small_tmpfs

from vram_conductor.protocol.errors import ConductorError, Internal, ResourceExhausted
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker import half_memory, kvstore
from vram_conductor.worker import pinning as pinning_module
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.half_memory import HalfMemory
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.pinning import Pinning
from vram_conductor.worker.store import ParkedMeta

STEP = fmt.GROW_BYTES
PIECE = 4 * STEP
ENOUGH = 1 << 40


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_memory, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(half_memory, "PIN_BYTES_MIN", 0)
    monkeypatch.setattr(kvstore, "PIN_FROM_SEQ", 1)
    monkeypatch.setattr(pinning_module, "RESERVE_BYTES", 2 * STEP)


def key(name: str) -> ConversationKey:
    return ConversationKey("local", "agent", name)


def meta(name: str, size: int) -> ParkedMeta:
    return ParkedMeta(key(name), "model", "build", "f16", "", size, 3, size)


def park(store: KVStore, name: str, data: bytes, *, max_bytes: int = 0) -> None:
    with store.writer(key(name), len(data), max_bytes) as view:
        view[:] = data
    store.commit(meta(name, len(data)))


def read(store: KVStore, name: str) -> bytes | None:
    found = store.read(key(name))
    if found is None:
        return None
    with found[1]:
        return bytes(found[1])


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


Opener = Callable[..., tuple[KVStore, FakePinner]]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens a store that pins; at the end everything must have been unpinned."""
    opened: list[tuple[KVStore, FakePinner]] = []

    def open_one(
        pinner: FakePinner | None = None, *, cap: int = 256 * STEP, pinned_cap: int = ENOUGH
    ) -> tuple[KVStore, FakePinner]:
        fake = pinner or FakePinner()
        folder = ArenaDir(tmp_path / f"arenas{len(opened)}", "cuda:0")
        store = KVStore(folder, cap, pinning=Pinning(pinned_cap, fake))
        opened.append((store, fake))
        return store, fake

    yield open_one
    for store, fake in opened:
        fake.check()
        store.close()
        assert not fake.ranges
        assert not fake.faults
        assert store.pinning.figures().pinned_bytes == 0


# --- one half -----------------------------------------------------------------------------------


@pytest.fixture
def half(tmp_path: Path) -> Iterator[tuple[HalfMemory, FakePinner, Pinning]]:
    import mmap

    fake = FakePinner()
    pinning = Pinning(ENOUGH, fake)
    fd = os.open(tmp_path / "half", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4096 + 32 * STEP)
    mapping = mmap.mmap(fd, 4096 + 32 * STEP)
    whole = memoryview(mapping)
    memory = HalfMemory(fd, 4096, whole[4096:], memoryview(bytearray(8)).cast("Q"), pinning)
    yield memory, fake, pinning
    fake.check()
    assert memory.close()
    assert memory.close(), "idempotent"
    assert memory.pin_some() == "done"
    assert not fake.ranges
    whole.release()
    mapping.close()
    os.close(fd)


def pin_all(half: HalfMemory) -> int:
    pieces = 1
    while half.pin_some() == "more":
        pieces += 1
    return pieces


def test_a_half_is_pinned_in_pieces(half: tuple[HalfMemory, FakePinner, Pinning]) -> None:
    memory, fake, pinning = half
    assert memory.pin_some() == "done", "nothing is allocated"
    memory.grow(10 * STEP)
    assert pin_all(memory) == 3
    assert (fake.calls, fake.largest_bytes) == (3, PIECE)
    assert memory.pinned_bytes == pinning.figures().pinned_bytes == 10 * STEP
    assert memory.pin_some() == "done"
    memory.grow(11 * STEP)
    assert pin_all(memory) == 1
    assert fake.calls == 4, "only what was added"
    with memory.view(11 * STEP, writable=True) as view:
        assert fake.covers(view) is True


def test_a_view_of_a_part_keeps_what_is_pinned_and_a_longer_one_does_not(
    half: tuple[HalfMemory, FakePinner, Pinning],
) -> None:
    memory, fake, _ = half
    memory.grow(8 * STEP)
    assert memory.pin_some() == "more"
    with memory.view(PIECE, writable=False) as short:
        assert fake.covers(short) is True
        assert memory.pin_some() == "done", "a short view is no hindrance"
    memory.grow(9 * STEP)
    with memory.view(9 * STEP, writable=False) as longer:
        assert fake.covers(longer) is True, "what lacks is one piece at most: it is pinned now"
    memory.grow(9 * STEP + 2 * PIECE)
    with memory.view(9 * STEP + 2 * PIECE, writable=False) as long:
        assert fake.covers(long) is False
        assert memory.pinned_bytes == 0
        assert memory.pin_some() == "busy"
        assert not fake.ranges
    assert pin_all(memory) == 5


def test_a_last_piece_that_is_refused_leaves_nothing_pinned(
    half: tuple[HalfMemory, FakePinner, Pinning],
) -> None:
    memory, fake, _ = half
    memory.grow(PIECE)
    pin_all(memory)
    memory.grow(PIECE + STEP)
    fake.refuse = lambda address, size: True
    with memory.view(PIECE + STEP, writable=True) as view:
        assert fake.covers(view) is False
    assert not fake.ranges


def test_little_memory_is_not_worth_a_call(
    half: tuple[HalfMemory, FakePinner, Pinning], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, fake, _ = half
    monkeypatch.setattr(half_memory, "PIN_BYTES_MIN", 2 * STEP)
    memory.grow(STEP)
    assert memory.pin_some() == "done"
    assert fake.calls == 0
    memory.grow(2 * STEP)
    pin_all(memory)
    assert memory.pinned_bytes == 2 * STEP


def test_a_view_that_is_dropped_without_a_release_hinders_nobody(
    half: tuple[HalfMemory, FakePinner, Pinning],
) -> None:
    memory, _, _ = half
    memory.grow(STEP)
    view = memory.view(STEP, writable=False)
    assert memory.pin_some() == "busy"
    del view
    assert memory.pin_some() == "done"
    assert memory.pinned_bytes == STEP


def test_where_copies_cannot_span_a_half_is_one_range(
    half: tuple[HalfMemory, FakePinner, Pinning],
) -> None:
    memory, fake, _ = half
    fake.spans = False
    memory.grow(10 * STEP)
    assert memory.pin_some() == "done"
    assert list(fake.ranges.values()) == [10 * STEP]
    memory.grow(12 * STEP)
    with memory.view(10 * STEP, writable=False) as view:
        assert memory.pin_some() == "busy", "what is being read is not unpinned"
        assert fake.covers(view) is True
    assert memory.pin_some() == "done"
    assert list(fake.ranges.values()) == [12 * STEP]


def test_shrinking_unpins_before_it_punches(half: tuple[HalfMemory, FakePinner, Pinning]) -> None:
    memory, fake, _ = half
    memory.grow(8 * STEP)
    pin_all(memory)
    assert memory.shrink(8 * STEP) == 0
    assert memory.pinned_bytes == 8 * STEP
    assert memory.shrink(3 * STEP) == 5 * STEP
    assert not fake.ranges
    assert memory.allocated_bytes == 3 * STEP
    pin_all(memory)
    assert list(fake.ranges.values()) == [3 * STEP]
    memory.reserve(6 * STEP)
    assert memory.taken_bytes == 6 * STEP
    assert memory.shrink(3 * STEP) == 0
    assert memory.taken_bytes == 3 * STEP
    assert memory.pinned_bytes == 3 * STEP, "what was only reserved needs no unpinning"


def test_what_is_reserved_is_allocated_when_it_is_pinned(
    half: tuple[HalfMemory, FakePinner, Pinning],
) -> None:
    memory, _, _ = half
    memory.grow(STEP)
    memory.reserve(100 * STEP)
    assert (memory.allocated_bytes, memory.taken_bytes) == (STEP, 32 * STEP)
    pin_all(memory)
    assert memory.allocated_bytes == memory.pinned_bytes == 32 * STEP


def test_a_full_file_system_only_ends_the_reserve(
    half: tuple[HalfMemory, FakePinner, Pinning], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _, _ = half
    memory.grow(STEP)
    memory.reserve(4 * STEP)

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert memory.pin_some() == "done"
    assert memory.taken_bytes == memory.pinned_bytes == STEP


def test_a_refusal_in_the_middle_leaves_the_half_pageable(
    half: tuple[HalfMemory, FakePinner, Pinning], caplog: pytest.LogCaptureFixture
) -> None:
    memory, fake, pinning = half
    memory.grow(12 * STEP)
    fake.refuse = lambda address, size: len(fake.ranges) == 2
    assert pin_all(memory) == 3
    assert not fake.ranges
    assert memory.pinned_bytes == pinning.figures().pinned_bytes == 0
    assert pinning.figures().cap_bytes == 8 * STEP, "no more than was possible"
    assert "too many" in pinning.figures().note
    with memory.view(12 * STEP, writable=True) as view:
        view[:] = b"x" * len(view)
        assert fake.covers(view) is False
    pin_all(memory)
    assert fake.calls == 5, "the two that are below the limit are tried, the third is not"
    assert len(caplog.records) == 1


def test_a_user_waits_for_one_piece_only(half: tuple[HalfMemory, FakePinner, Pinning]) -> None:
    memory, fake, _ = half
    memory.grow(32 * STEP)
    entered, let = threading.Event(), threading.Event()

    def slow(address: int, size: int) -> bool:
        entered.set()
        assert let.wait(20)
        return False

    fake.refuse = slow
    pinning = threading.Thread(target=lambda: pin_all(memory))
    pinning.start()
    assert entered.wait(20)
    views: list[memoryview] = []
    user = threading.Thread(target=lambda: views.append(memory.view(32 * STEP, writable=True)))
    user.start()
    until(lambda: memory._users > 0, "the user never came")
    let.set()
    user.join(20)
    pinning.join(20)
    assert fake.calls == 1
    assert fake.covers(views[0]) is False
    views[0].release()


def test_what_cannot_be_unpinned_is_neither_punched_nor_unmapped(
    half: tuple[HalfMemory, FakePinner, Pinning], caplog: pytest.LogCaptureFixture
) -> None:
    memory, fake, pinning = half
    memory.grow(2 * STEP)
    pin_all(memory)
    fake.stuck = True
    with pytest.raises(Internal):
        memory.shrink(0)
    assert memory.allocated_bytes == memory.pinned_bytes == 2 * STEP
    assert not memory.close()
    assert "stays mapped" in caplog.text
    fake.check()
    assert pinning.figures().pinned_bytes == 2 * STEP
    fake.stuck = False


# --- the account --------------------------------------------------------------------------------


def test_the_cap_is_kept() -> None:
    fake = FakePinner()
    pinning = Pinning(3 * STEP, fake)
    fake.pin = lambda address, size: None  # type: ignore[method-assign]
    fake.unpin = lambda address: None  # type: ignore[method-assign]
    assert pinning.pin(0, 2 * STEP)
    assert not pinning.pin(2 * STEP, 2 * STEP)
    assert pinning.pin(2 * STEP, STEP)
    assert not pinning.pin(3 * STEP, 1)
    pinning.unpin(0)
    assert pinning.pin(4 * STEP, STEP)
    assert pinning.figures().pinned_bytes == 2 * STEP


def test_nothing_is_tried_without_a_pinner_or_with_a_cap_of_zero() -> None:
    assert not Pinning(ENOUGH).active
    assert Pinning(ENOUGH).note() == ""
    assert not Pinning(0, FakePinner()).active
    late = Pinning(ENOUGH)
    late.use(FakePinner())
    assert late.active
    assert late.note() == "parked states are pinned"
    never = Pinning(0)
    never.use(FakePinner())
    assert not never.active
    assert not never.pin(0, STEP)


def test_giving_up_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    pinning = Pinning(ENOUGH)
    pinning.give_up("no driver")
    assert not pinning.active
    assert pinning.figures().note == "no driver"
    assert pinning.note() == "parked states are pageable (no driver)"
    assert len(caplog.records) == 1


# --- the arena ----------------------------------------------------------------------------------


def test_halves_of_an_arena_are_pinned_in_their_turns_and_unpinned_with_it(tmp_path: Path) -> None:
    fake = FakePinner()
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    arena = Arena.create(dir_fd, "a.kv", 16 * STEP, Pinning(ENOUGH, fake))

    def put(number: int, *, pinned: bool) -> None:
        with arena.begin(6 * STEP) as view:
            assert fake.covers(view) is pinned
            view[:] = bytes([number]) * len(view)
        arena.commit(meta("a", 6 * STEP))
        assert arena.pinned is pinned
        while arena.pin_some() != "done":
            pass
        assert arena.pinned

    put(1, pinned=False)
    assert sum(fake.ranges.values()) == 6 * STEP
    put(2, pinned=False)
    assert sum(fake.ranges.values()) == 12 * STEP
    put(3, pinned=True)
    assert arena.free_spare() == 6 * STEP
    assert arena.pinned
    put(4, pinned=False)
    arena.hold()
    arena.close()
    assert arena.pin_some() == "done", "nothing new once it is to be closed"
    fake.check()
    arena.release()
    assert not fake.ranges
    os.close(dir_fd)


# --- the store ----------------------------------------------------------------------------------


def test_a_parked_state_is_pinned_soon_and_the_next_one_goes_straight_into_it(
    opener: Opener,
) -> None:
    store, fake = opener()
    data = b"x" * (10 * STEP)
    for _ in range(2):
        park(store, "a", data, max_bytes=64 * STEP)
        until(lambda: store.pinned(key("a")), "never pinned")
    with store.writer(key("a"), 11 * STEP, 64 * STEP) as view:
        assert fake.covers(view) is True, "there is a reserve for what a conversation grows by"
        view[:] = b"y" * len(view)
    store.commit(meta("a", 11 * STEP))
    assert store.pinned(key("a"))
    found = store.read(key("a"))
    assert found is not None
    with found[1] as view:
        assert fake.covers(view) is True
        assert bytes(view) == b"y" * (11 * STEP)
    assert store.bytes(key("a")) == fmt.HEADER_BYTES + 11 * STEP, "a reserve is spare"
    assert not store.pinned(key("b"))


def test_a_conversation_that_grows_is_not_pinned_anew_at_every_turn(opener: Opener) -> None:
    store, fake = opener(FakePinner(spans=False), cap=4000 * STEP)
    for size in range(20, 40):
        park(store, "a", b"x" * (size * STEP), max_bytes=1000 * STEP)
        until(lambda: store.pinned(key("a")), "never pinned")
    assert fake.calls < 16, "two halves, and a few times each"


def test_a_conversation_that_may_be_over_is_not_pinned(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore, "PIN_FROM_SEQ", 2)
    store, fake = opener()
    park(store, "once", b"x" * STEP)
    park(store, "again", b"y" * STEP)
    park(store, "again", b"z" * STEP)
    until(lambda: store.pinned(key("again")), "never pinned")
    assert not store.pinned(key("once"))
    assert fake.calls == 1


def test_a_state_that_is_read_again_and_again_is_pinned(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was parked once: many may begin with it, and it is never parked anew."""
    monkeypatch.setattr(kvstore, "PIN_FROM_SEQ", 2)
    store, fake = opener()

    def read(name: str) -> None:
        found = store.read(key(name))
        assert found is not None
        with found[1] as view:
            assert bytes(view) == name.encode() * (2 * STEP)
            fake.check()

    for name in "ab":
        park(store, name, name.encode() * (2 * STEP))
    read("b")
    read("a")
    read("a")
    until(lambda: store.pinned(key("a")), "never pinned")
    read("a")
    assert not store.pinned(key("b")), "read once"
    assert fake.calls == 1
    # It is another state that is parked next, and nobody knows whether that comes back.
    store.delete(key("a"))
    park(store, "a", b"a" * (2 * STEP))
    read("a")
    assert not store.pinned(key("a"))


def test_a_reserve_never_costs_anybody_room(opener: Opener) -> None:
    store, _ = opener(cap=20 * STEP)
    for data in (b"1", b"2"):
        park(store, "a", data * (4 * STEP), max_bytes=20 * STEP)
        until(lambda: store.pinned(key("a")), "never pinned")
    assert store.spare_bytes == 4 * STEP, "no reserve where half of the room is taken"
    park(store, "b", b"b" * (12 * STEP))
    assert store.used_bytes <= 20 * STEP
    assert read(store, "a") == b"2" * (4 * STEP)
    until(lambda: store.pinned(key("a")) and store.pinned(key("b")), "never pinned again")


def test_what_the_ledger_promises_is_enough_with_pinning_too(opener: Opener) -> None:
    """Each state as its file takes it, and the largest once more."""
    sizes = {"a": 3 * STEP + 17, "b": 5 * STEP, "c": 1, "d": 2 * STEP + 5000}
    promised = [fmt.parked_bytes(size) for size in sizes.values()]
    store, fake = opener(cap=sum(promised) + max(promised))
    for turn in range(1, 30):
        for name, size in sizes.items():
            data = bytes([turn]) * (size if turn > 2 else max(1, size * turn // 3))
            park(store, name, data, max_bytes=fmt.parked_bytes(size))
            assert read(store, name) == data
    fake.check()


def test_a_reserve_is_given_back_where_room_is_needed(opener: Opener) -> None:
    store, fake = opener(cap=24 * STEP)
    park(store, "a", b"a" * (2 * STEP), max_bytes=20 * STEP)
    until(lambda: store.pinned(key("a")), "never pinned")
    assert store.spare_bytes == 2 * STEP
    park(store, "b", b"b" * (21 * STEP))
    assert (store.spare_bytes, store.bytes(key("a"))) == (0, fmt.HEADER_BYTES + 2 * STEP)
    until(lambda: store.pinned(key("a")) and store.pinned(key("b")), "never pinned again")
    fake.check()


def test_a_small_file_system_has_no_room_for_a_reserve(tmp_path: Path) -> None:
    fake = FakePinner()
    with small_tmpfs(tmp_path, 12 * STEP) as mount:
        pinning = Pinning(ENOUGH, fake)
        store = KVStore(ArenaDir(mount / "arenas", "cuda:0"), 1 << 40, pinning=pinning)
        try:
            for turn in range(4):
                data = bytes([turn]) * (5 * STEP)
                park(store, "a", data, max_bytes=100 * STEP)
                until(lambda: store.pinned(key("a")), "never pinned")
                fake.check()
                assert read(store, "a") == data
                assert store.pinned(key("a"))
            with pytest.raises(ResourceExhausted):
                store.writer(key("b"), 9 * STEP, 0)
            assert read(store, "a") == data
        finally:
            store.close()
    assert not fake.ranges
    assert not fake.faults


def test_memory_limits_make_it_slower_and_nothing_else(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    store, fake = opener(FakePinner(limit_bytes=0))
    for turn in range(3):
        park(store, "a", bytes([turn]) * (5 * STEP))
        assert read(store, "a") == bytes([turn]) * (5 * STEP)
    until(lambda: store.pinning.figures().note != "", "never tried")
    assert not store.pinned(key("a"))
    assert store.pinning.figures().cap_bytes == 0
    assert fake.calls == 1, "asked once"
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_deleting_and_outgrowing_unpin_before_they_unmap(opener: Opener) -> None:
    store, fake = opener()
    park(store, "a", b"a" * STEP, max_bytes=STEP)
    until(lambda: store.pinned(key("a")), "never pinned")
    park(store, "a", b"A" * (3 * STEP), max_bytes=3 * STEP)
    until(lambda: store.pinned(key("a")), "never pinned")
    assert sum(fake.ranges.values()) == 3 * STEP
    store.delete(key("a"))
    assert not fake.ranges


def test_a_new_life_pins_what_it_parks(tmp_path: Path) -> None:
    for life in range(3):
        fake = FakePinner()
        folder = ArenaDir(tmp_path / "arenas", "cuda:0")
        store = KVStore(folder, 64 * STEP, pinning=Pinning(ENOUGH, fake))
        if life:
            assert read(store, "a") == bytes([life - 1]) * STEP
        park(store, "a", bytes([life]) * STEP)
        until(lambda: store.pinned(key("a")), "never pinned")  # noqa: B023
        fake.check()
        store.close()
        assert not fake.ranges


@pytest.mark.parametrize("spans", [True, False])
def test_under_load_every_view_is_pinned_as_a_whole_or_not_at_all(
    opener: Opener, spans: bool
) -> None:
    """Random use with a store that is short of room, beside two threads that keep the cores busy
    and a pinner that takes its time."""
    fake = FakePinner(spans=spans, limit_bytes=60 * STEP)
    store, _ = opener(fake, cap=90 * STEP, pinned_cap=70 * STEP)
    fake.pause_s = 0.0005
    rng = random.Random(20240607)
    stop = threading.Event()
    interval_s = sys.getswitchinterval()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    burners = [threading.Thread(target=burn) for _ in range(2)]
    sys.setswitchinterval(0.0005)
    for burner in burners:
        burner.start()
    expected: dict[str, bytes] = {}
    seen = {True: 0, False: 0}
    try:
        for turn in range(160):
            name = rng.choice("abcdef")
            choice = rng.random()
            if choice < 0.5:
                data = turn.to_bytes(2, "little") * (rng.randrange(1, 14 * STEP) // 2 + 1)
                try:
                    view = store.writer(key(name), len(data), rng.choice([0, 12 * STEP]))
                except ResourceExhausted:
                    continue
                with view:
                    whole = fake.covers(view)
                    assert whole is not None
                    view[:] = data
                    assert fake.covers(view) in (whole, True)
                if rng.random() < 0.9:
                    store.commit(meta(name, len(data)))
                    expected[name] = data
            elif choice < 0.9:
                found = store.read(key(name))
                assert (found is None) == (name not in expected)
                if found is None:
                    continue
                with found[1] as view:
                    whole = fake.covers(view)
                    assert whole is not None
                    seen[whole] += 1
                    assert bytes(view) == expected[name]
                    assert fake.covers(view) in (whole, True), "it was unpinned during a copy"
            elif choice < 0.95:
                store.delete(key(name))
                expected.pop(name, None)
            else:
                lent = rng.choice([STEP, 20 * STEP])
                if store.lend(lent):
                    store.take_back(lent)
            assert store.used_bytes <= store.capacity_bytes
            assert store.pinning.figures().pinned_bytes <= 70 * STEP
        fake.check()
    finally:
        sys.setswitchinterval(interval_s)
        stop.set()
        for burner in burners:
            burner.join()
    assert seen[True], "nothing was ever pinned"


def test_errors_of_the_device_do_not_end_the_sealing_thread(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    store, fake = opener(FakePinner(spans=False))
    park(store, "a", b"a" * STEP, max_bytes=8 * STEP)
    until(lambda: store.pinned(key("a")), "never pinned")
    fake.stuck = True
    arena = store._mapped[key("a")]
    arena.reserve(8 * STEP, 8 * STEP)
    store._sealer.pin(arena)
    until(lambda: "left as it is" in caplog.text, "no error")
    store._sealer.settle()
    fake.stuck = False
    with pytest.raises(ConductorError):
        store.writer(key("b"), 1000 * STEP, 0)
