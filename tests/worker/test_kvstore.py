"""The store of parked states: cap, growth, adoption, deletion, privacy of its folder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_tmpfs import small_tmpfs

from vram_conductor.protocol.errors import (
    ConductorError,
    DataLoss,
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
)
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.arena_dir import ArenaDir, arena_name
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.store import ParkedMeta, Store
from vram_conductor.worker.surplus import short_bytes

STEP = fmt.GROW_BYTES
CAP = 64 * STEP
Opener = Callable[..., KVStore]


def key(name: str) -> ConversationKey:
    return ConversationKey("local", "agent", name)


def park(store: Store, name: str, data: bytes, *, max_bytes: int = 0) -> ParkedMeta:
    meta = ParkedMeta(key(name), "model", "build", "f16", "", len(data), 3, len(data))
    with store.writer(key(name), len(data), max_bytes) as view:
        assert len(view) == len(data)
        view[:] = data
    store.commit(meta)
    return meta


def read(store: Store, name: str) -> bytes | None:
    found = store.read(key(name))
    if found is None:
        return None
    meta, payload = found
    assert meta == store.meta(key(name))
    with payload:
        return bytes(payload)


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    """Opens the store as a new life of the worker would; the one before is closed."""
    last: list[KVStore] = []

    def opened(cap: int = CAP, mapped_max: int = 128, folder: Path | None = None) -> KVStore:
        if last:
            last.pop().close()
        store = KVStore(ArenaDir(folder or tmp_path / "arenas", "cpu"), cap, mapped_max)
        last.append(store)
        return store

    yield opened
    if last:
        last[0].close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.kv*"))


def test_park_read_replace_delete(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    assert read(store, "a") is None
    assert store.meta(key("a")) is None
    first = park(store, "a", b"one")
    assert store.meta(key("a")) == first
    assert read(store, "a") == b"one"
    park(store, "a", b"two!")
    assert read(store, "a") == b"two!"
    assert read(store, "a") == b"two!"
    assert store.keys() == [key("a")]
    assert store.bytes(key("a")) + store.spare_bytes == store.used_bytes
    assert store.spare_bytes > 0
    store.delete(key("a"))
    store.delete(key("a"))
    assert read(store, "a") is None
    assert (store.used_bytes, store.keys(), files(tmp_path)) == (0, [], [])


def test_an_uncommitted_write_is_discarded(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    with store.writer(key("a"), 3, 0) as view:
        view[:] = b"one"
    assert read(store, "a") is None
    assert files(tmp_path) == []
    park(store, "a", b"two")
    with store.writer(key("a"), 5, 0) as view:
        view[:] = b"three"
    assert read(store, "a") == b"two"
    with pytest.raises(AssertionError):
        store.commit(ParkedMeta(key("a"), "m", "b", "f16", "", 0, 0, 5))


def test_an_outgrown_arena_is_replaced_and_kept_until_then(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    park(store, "a", b"small", max_bytes=100)
    big = b"x" * (3 * STEP)
    with store.writer(key("a"), len(big), 0) as view:
        view[:] = big
    assert len(files(tmp_path)) == 2, "old and new are both there"
    assert read(store, "a") == b"small"
    park(store, "a", big)
    assert files(tmp_path) == [arena_name(key("a"))]
    assert read(store, "a") == big
    assert read(opener(), "a") == big


def test_sized_for_its_largest_state_but_only_what_is_used_is_allocated(opener: Opener) -> None:
    store = opener(cap=10 * STEP)
    park(store, "a", b"x", max_bytes=1000 * STEP)
    assert store.bytes(key("a")) == fmt.HEADER_BYTES + STEP
    arena = store._mapped[key("a")]
    park(store, "a", b"y" * (2 * STEP))
    assert store._mapped[key("a")] is arena, "no new file while it fits"
    assert store.bytes(key("a")) == fmt.HEADER_BYTES + 2 * STEP
    assert store.used_bytes == fmt.HEADER_BYTES + 3 * STEP


def test_full_is_an_error_with_numbers_and_loses_nothing(opener: Opener) -> None:
    store = opener(cap=10 * STEP)
    park(store, "a", b"a" * (4 * STEP))
    park(store, "b", b"b" * (4 * STEP))
    with pytest.raises(ResourceExhausted) as caught:
        store.writer(key("c"), 2 * STEP, 0)
    assert caught.value.reason == "arena_full"
    assert caught.value.details["capacity_bytes"] == 10 * STEP
    assert caught.value.details["need_bytes"] == 2 * STEP + fmt.HEADER_BYTES
    assert caught.value.details["used_bytes"] == store.used_bytes <= 10 * STEP
    with pytest.raises(ResourceExhausted):
        store.writer(key("a"), 4 * STEP, 0)
    assert read(store, "a") == b"a" * (4 * STEP)
    assert read(store, "b") == b"b" * (4 * STEP)
    store.delete(key("b"))
    park(store, "a", b"A" * (4 * STEP))
    assert read(store, "a") == b"A" * (4 * STEP)


def test_a_state_larger_than_the_cap_is_refused(opener: Opener) -> None:
    store = opener(cap=4 * STEP)
    with pytest.raises(ResourceExhausted, match="raise host_cap"):
        store.writer(key("a"), 100 * STEP, 0)
    assert store.used_bytes == 0
    park(store, "a", b"fits")


def test_spare_halves_make_room_before_anything_is_refused(opener: Opener) -> None:
    store = opener(cap=12 * STEP)
    for data in (b"1", b"2"):
        park(store, "a", data * (4 * STEP))
    assert store.used_bytes == fmt.HEADER_BYTES + 8 * STEP
    assert (store.bytes(key("a")), store.spare_bytes) == (fmt.HEADER_BYTES + 4 * STEP, 4 * STEP)
    park(store, "b", b"b" * (6 * STEP))
    assert store.bytes(key("a")) == fmt.HEADER_BYTES + 4 * STEP
    assert store.spare_bytes == 0
    assert store.used_bytes <= 12 * STEP
    assert read(store, "a") == b"2" * (4 * STEP)
    assert read(store, "b") == b"b" * (6 * STEP)


def test_room_for_every_largest_state_and_one_more_is_enough(opener: Opener) -> None:
    """What the ledger promises: each state as its file takes it, and the largest once more."""
    sizes = {"a": 3 * STEP + 17, "b": 5 * STEP, "c": 1, "d": 2 * STEP + 5000}
    promised = [fmt.parked_bytes(size) for size in sizes.values()]
    store = opener(cap=sum(promised) + max(promised))
    for turn in range(1, 9):
        for name, size in sizes.items():
            data = bytes([turn]) * (size if turn > 2 else max(1, size * turn // 3))
            park(store, name, data, max_bytes=fmt.parked_bytes(size))
            assert read(store, name) == data


def test_what_is_lent_is_not_there_for_states(opener: Opener) -> None:
    store = opener(cap=12 * STEP)
    for data in (b"1", b"2"):
        park(store, "a", data * (4 * STEP))
    assert not store.lend(8 * STEP), "the committed state keeps its header too"
    assert (store.lent_bytes, store.spare_bytes) == (0, 4 * STEP), "a refusal frees nothing"
    assert store.lend(7 * STEP)
    assert (store.lent_bytes, store.spare_bytes) == (7 * STEP, 0)
    assert store.capacity_bytes == 12 * STEP
    with pytest.raises(ResourceExhausted) as caught:
        store.writer(key("b"), STEP, 0)
    details = caught.value.details
    assert short_bytes(details) == 2 * fmt.HEADER_BYTES
    assert details["capacity_bytes"] == 5 * STEP
    assert not store.lend(STEP)
    store.take_back(3 * STEP)
    park(store, "b", b"b" * STEP)
    assert store.used_bytes + store.lent_bytes <= 12 * STEP
    with pytest.raises(AssertionError):
        store.take_back(5 * STEP)
    assert read(store, "a") == b"2" * (4 * STEP)


def test_only_so_many_arenas_are_mapped(opener: Opener) -> None:
    store = opener(mapped_max=3)
    for index in range(10):
        park(store, f"c{index}", b"%d" % index)
    assert len(store._mapped) == 3
    views: list[memoryview[int]] = []
    for index in range(10):
        found = store.read(key(f"c{index}"))
        assert found is not None
        views.append(found[1])
    assert [bytes(view) for view in views] == [b"%d" % index for index in range(10)]
    for view in views:
        view.release()
    assert len(store._mapped) == 3
    assert store.keys() == [key(f"c{i}") for i in range(10)]


def test_many_writers_at_once_stay_mapped(opener: Opener) -> None:
    store = opener(mapped_max=2)
    for index in range(6):
        park(store, f"c{index}", b"old")
    for index in range(6):
        with store.writer(key(f"c{index}"), 3, 0) as view:
            view[:] = b"new"
    for index in range(6):
        store.commit(ParkedMeta(key(f"c{index}"), "m", "b", "f16", "", 0, 0, 3))
    assert [read(store, f"c{index}") for index in range(6)] == [b"new"] * 6


def test_a_new_life_adopts_what_was_parked(opener: Opener) -> None:
    store = opener()
    metas = [park(store, name, name.encode() * 1000) for name in ("a", "b")]
    for _ in range(2):
        store = opener()
        assert sorted(store.keys()) == [key("a"), key("b")]
        assert [store.meta(key("a")), store.meta(key("b"))] == metas
        assert store.used_bytes == 2 * (fmt.HEADER_BYTES + fmt.half_bytes_for(1000))
        assert read(store, "a") == b"a" * 1000
    park(store, "a", b"new")
    assert read(opener(), "a") == b"new"


def test_a_flipped_byte_is_detected_at_the_first_read(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    park(store, "a", b"a" * 1000)
    park(store, "b", b"b" * 1000)
    store = opener()
    path = tmp_path / "arenas" / "device-cpu" / arena_name(key("a"))
    with path.open("r+b") as file:
        file.seek(fmt.HEADER_BYTES + 500)
        file.write(b"?")
    with pytest.raises(DataLoss) as caught:
        store.read(key("a"))
    assert caught.value.reason == "state_corrupt"
    assert store.read(key("a")) is None
    assert not path.exists()
    assert read(store, "b") == b"b" * 1000
    park(store, "a", b"again")
    assert read(store, "a") == b"again"


def test_damaged_and_unsealed_and_unfinished_files_go_others_stay(
    opener: Opener, tmp_path: Path
) -> None:
    store = opener()
    for name in ("good", "cut", "magic", "moved"):
        park(store, name, name.encode() * 10)
    store.close()
    folder = tmp_path / "arenas" / "device-cpu"
    os.truncate(folder / arena_name(key("cut")), 5000)
    data = (folder / arena_name(key("magic"))).read_bytes()
    (folder / arena_name(key("magic"))).write_bytes(b"X" + data[1:])
    (folder / arena_name(key("moved"))).rename(folder / ("0" * 32 + ".kv"))
    (folder / (arena_name(key("good")) + ".new")).write_bytes(b"half of something")
    foreign = ["notes.txt", "0" * 31 + ".kv", "A" * 32 + ".kv", "lock"]
    for name in foreign[:-1]:
        (folder / name).write_text("mine")
    (folder / ("1" * 32 + ".kv")).symlink_to(tmp_path / "elsewhere")
    (folder / ("2" * 32 + ".kv")).mkdir()
    store = KVStore(ArenaDir(tmp_path / "arenas", "cpu"), CAP)
    assert store.keys() == [key("good")]
    left = sorted(path.name for path in folder.iterdir())
    kept = [*foreign, "1" * 32 + ".kv", "2" * 32 + ".kv", arena_name(key("good"))]
    assert left == sorted(kept)
    assert (folder / "notes.txt").read_text() == "mine"
    store.close()


def test_a_file_damaged_after_adoption_is_no_crash(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    park(store, "a", b"a" * 100)
    park(store, "b", b"b" * 100)
    store = opener()
    folder = tmp_path / "arenas" / "device-cpu"
    os.truncate(folder / arena_name(key("a")), 10)
    (folder / arena_name(key("b"))).unlink()
    with pytest.raises(DataLoss):
        store.read(key("a"))
    with store.writer(key("b"), 3, 0) as view:
        view[:] = b"new"
    store.commit(ParkedMeta(key("b"), "m", "b", "f16", "", 0, 0, 3))
    assert read(store, "b") == b"new"
    assert store.keys() == [key("b")]


def test_a_smaller_cap_keeps_the_youngest(opener: Opener, tmp_path: Path) -> None:
    store = opener()
    for index, name in enumerate("abc"):
        park(store, name, b"x" * STEP)
        path = tmp_path / "arenas" / "device-cpu" / arena_name(key(name))
        os.utime(path, ns=(index, index))
    store = opener(cap=2 * (STEP + fmt.HEADER_BYTES))
    assert store.keys() == [key("b"), key("c")]
    assert store.used_bytes <= store.capacity_bytes


def test_two_workers_never_share_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vram_conductor")
    first = ArenaDir(tmp_path / "arenas", "cpu")
    with pytest.raises(FailedPrecondition, match=str(os.getpid())) as caught:
        ArenaDir(tmp_path / "arenas", "cpu")
    assert caught.value.reason == "arena_in_use"
    assert not caplog.records, "nobody waited"
    with pytest.raises(FailedPrecondition):
        ArenaDir(tmp_path / "arenas", "cpu", patience_s=0.2)
    (record,) = caplog.records
    assert f"another worker (pid {os.getpid()}) has the parked states of cpu" in record.getMessage()
    other = ArenaDir(tmp_path / "arenas", "cpu:1")
    other.close()
    first.close()
    ArenaDir(tmp_path / "arenas", "cpu").close()


@pytest.mark.parametrize("device", ["cuda:0", "../../etc", "a/b", ".."])
def test_a_device_name_never_leaves_the_folder(tmp_path: Path, device: str) -> None:
    folder = ArenaDir(tmp_path / "arenas", device)
    assert folder.path.resolve().parent == (tmp_path / "arenas").resolve()
    folder.close()


def test_unsafe_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    for name, word in (("link", "symbolic"), ("file", "folder"), ("open", "chmod 700")):
        with pytest.raises(PermissionDenied, match=word) as caught:
            ArenaDir(tmp_path / name, "cpu")
        assert caught.value.reason == "arena_dir_unsafe"
    with pytest.raises(FailedPrecondition, match="arena_dir"):
        ArenaDir(tmp_path / "none" / "arenas", "cpu")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionDenied, match="belongs"):
        ArenaDir(target, "cpu")


def test_folders_and_files_are_private(opener: Opener, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        park(opener(), "a", b"secret")
    finally:
        os.umask(old)
    for path in (tmp_path / "arenas").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "arenas").stat().st_mode & 0o777 == 0o700


def test_a_file_size_limit_is_disk_full(opener: Opener) -> None:
    store = opener()
    park(store, "a", b"small", max_bytes=4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (STEP, hard))
    try:
        with pytest.raises(ResourceExhausted) as caught:
            store.writer(key("a"), 10 * STEP, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.reason == "disk_full"
    assert read(store, "a") == b"small"
    assert store.used_bytes == store.bytes(key("a")) + store.spare_bytes


@pytest.fixture
def full_soon(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path, 20 * STEP) as mount:
        yield mount


def test_a_full_tmpfs_is_an_error_and_never_a_signal(opener: Opener, full_soon: Path) -> None:
    store = opener(cap=1000 * STEP, folder=full_soon / "arenas")
    park(store, "a", b"a" * (4 * STEP))
    park(store, "b", b"b" * (4 * STEP))
    # Sparse space is promised for far more than the file system has.
    park(store, "c", b"c", max_bytes=100 * STEP)
    with pytest.raises(ResourceExhausted) as caught:
        store.writer(key("c"), 50 * STEP, 0)
    assert caught.value.reason == "disk_full"
    assert caught.value.details["free_bytes"] < 20 * STEP
    with pytest.raises(ResourceExhausted):
        store.writer(key("d"), 50 * STEP, 0)
    assert [read(store, name) for name in "abc"] == [b"a" * 4 * STEP, b"b" * 4 * STEP, b"c"]
    park(store, "a", b"A" * (4 * STEP))
    assert read(store, "a") == b"A" * (4 * STEP)


def test_spare_halves_make_room_in_a_full_tmpfs(opener: Opener, full_soon: Path) -> None:
    store = opener(cap=1000 * STEP, folder=full_soon / "arenas")
    for data in (b"1", b"2"):
        park(store, "a", data * (8 * STEP))
    deadline = time.monotonic() + 10
    while store._mapped[key("a")]._holds and time.monotonic() < deadline:
        time.sleep(0.001)
    park(store, "b", b"b" * (8 * STEP))
    assert read(store, "a") == b"2" * (8 * STEP)
    assert read(store, "b") == b"b" * (8 * STEP)


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from vram_conductor.worker.arena_dir import ArenaDir\n"
        "ArenaDir(Path(sys.argv[1]), 'cpu'); print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "arenas")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(ConductorError, match=str(holder.pid)):
            ArenaDir(tmp_path / "arenas", "cpu")
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    ArenaDir(tmp_path / "arenas", "cpu").close()
