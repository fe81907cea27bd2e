"""The arena file: two halves, commit word, seal, damage of every kind."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from vram_conductor.protocol.errors import DataLoss, Internal, ResourceExhausted
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.store import ParkedMeta

KEY = ConversationKey("local", "coder", "main")
NAME = "a.kv"


def meta(size: int, n_tokens: int = 7) -> ParkedMeta:
    return ParkedMeta(KEY, "m0del", "b1", "q8_0", "params", 2**64 - 1, n_tokens, size)


@pytest.fixture
def dir_fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def park(arena: Arena, data: bytes, n_tokens: int = 7) -> None:
    with arena.begin(len(data)) as view:
        view[:] = data
    arena.commit(meta(len(data), n_tokens))


def reopened(dir_fd: int, *, sealed_only: bool = False) -> tuple[ParkedMeta | None, bytes]:
    """What a crash at this instant would leave, seen on a copy."""
    folder = Path(f"/proc/self/fd/{dir_fd}").resolve()
    shutil.copyfile(folder / NAME, folder / "copy.kv")
    arena = Arena.open(dir_fd, "copy.kv", sealed_only=sealed_only)
    try:
        if arena.meta is None:
            return None, b""
        with arena.payload() as payload:
            return arena.meta, bytes(payload)
    finally:
        arena.close()


def test_a_new_arena_is_private_and_holds_nothing(dir_fd: int, tmp_path: Path) -> None:
    arena = Arena.create(dir_fd, NAME, 8192)
    info = (tmp_path / NAME).stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == fmt.file_bytes(8192)
    assert arena.meta is None
    assert arena.allocated_bytes == fmt.HEADER_BYTES
    arena.close()
    arena.close()
    assert reopened(dir_fd) == (None, b"")
    with pytest.raises(Internal, match="exists"):
        Arena.create(dir_fd, NAME, 8192)


def test_states_alternate_between_the_halves(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 8192)
    for number in range(5):
        park(arena, bytes([number]) * (1000 + number), number)
        assert reopened(dir_fd) == (meta(1000 + number, number), bytes([number]) * (1000 + number))
    assert arena.seq == 5
    arena.close()


def test_an_unfinished_write_leaves_the_state_before_it(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 8192)
    park(arena, b"first")
    with arena.begin(6) as view:
        view[:] = b"second"
    assert reopened(dir_fd)[1] == b"first"
    with arena.begin(5) as view:  # A second begin discards the first.
        view[:] = b"third"
    arena.commit(meta(5))
    assert reopened(dir_fd)[1] == b"third"
    arena.close()


def test_commit_may_be_shorter_than_the_view_and_empty(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    with arena.begin(4096) as view:
        view[:4] = b"good"
    arena.commit(meta(4))
    assert reopened(dir_fd)[1] == b"good"
    with arena.begin(0) as view:
        assert len(view) == 0
    arena.commit(meta(0))
    assert reopened(dir_fd) == (meta(0), b"")
    arena.close()


def test_memory_is_allocated_as_it_is_needed_and_given_back(dir_fd: int, tmp_path: Path) -> None:
    half_bytes = 64 * fmt.GROW_BYTES
    arena = Arena.create(dir_fd, NAME, half_bytes)
    assert arena.growth_bytes(1) == fmt.GROW_BYTES
    park(arena, b"x")
    assert arena.allocated_bytes == fmt.HEADER_BYTES + fmt.GROW_BYTES
    assert arena.growth_bytes(half_bytes) == half_bytes
    park(arena, b"y" * half_bytes)
    assert arena.growth_bytes(1) == 0
    park(arena, b"z")
    assert arena.allocated_bytes == fmt.HEADER_BYTES + fmt.GROW_BYTES + half_bytes
    before = (tmp_path / NAME).stat().st_blocks * 512
    assert before >= arena.allocated_bytes
    assert arena.free_spare() == half_bytes
    assert (tmp_path / NAME).stat().st_blocks * 512 <= before - half_bytes
    assert arena.free_spare() == 0
    assert reopened(dir_fd)[1] == b"z"
    park(arena, b"w" * 100)
    assert reopened(dir_fd)[1] == b"w" * 100
    arena.close()


def test_only_a_sealed_state_counts_when_asked(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"one", 1)
    assert reopened(dir_fd, sealed_only=True) == (None, b"")
    assert arena.seal()
    assert reopened(dir_fd, sealed_only=True)[1] == b"one"
    park(arena, b"two", 2)
    assert reopened(dir_fd, sealed_only=True)[1] == b"one", "the state before is still whole"
    with arena.begin(5) as view:
        view[:] = b"three"
    assert reopened(dir_fd, sealed_only=True) == (None, b""), "now it is being overwritten"
    arena.commit(meta(5, 3))
    assert arena.seal()
    assert reopened(dir_fd, sealed_only=True)[1] == b"three"
    arena.close()


def test_a_passed_over_state_never_comes_back(dir_fd: int) -> None:
    """An unsealed newest state was not adopted; later commits must not make it valid again."""
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"one", 1)
    arena.seal()
    park(arena, b"two", 2)
    arena.close()
    adopted = Arena.open(dir_fd, NAME, sealed_only=True)
    park(adopted, b"three", 3)
    adopted.seal()
    adopted.close()
    assert reopened(dir_fd, sealed_only=True)[1] == b"three"


def test_a_seal_that_comes_too_late_does_not_count(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"one", 1)
    late = arena._held
    park(arena, b"two", 2)
    park(arena, b"three", 3)
    newest = arena._held
    arena._held = late  # As the sealing thread saw it.
    arena.seal()
    arena._held = newest
    assert reopened(dir_fd, sealed_only=True) == (None, b"")
    arena.close()


def test_verify_detects_a_flipped_byte_anywhere_in_the_payload(dir_fd: int, tmp_path: Path) -> None:
    arena = Arena.create(dir_fd, NAME, 8192)
    park(arena, b"0123456789" * 500)
    arena.seal()
    arena.close()
    for offset in (0, 1, 2500, 4999):
        with (tmp_path / NAME).open("r+b") as file:
            file.seek(fmt.HEADER_BYTES + offset)
            byte = file.read(1)[0]
            file.seek(fmt.HEADER_BYTES + offset)
            file.write(bytes([byte ^ 1]))
        broken = Arena.open(dir_fd, NAME, sealed_only=True)
        with pytest.raises(DataLoss) as caught:
            broken.verify()
        assert caught.value.reason == "state_corrupt"
        broken.close()
        with (tmp_path / NAME).open("r+b") as file:
            file.seek(fmt.HEADER_BYTES + offset)
            file.write(bytes([byte]))
    whole = Arena.open(dir_fd, NAME, sealed_only=True)
    whole.verify()
    whole.close()


def test_every_flipped_header_byte_is_detected_or_harmless(dir_fd: int, tmp_path: Path) -> None:
    """Flip each byte of the used header: the state is refused, passed over, or still the same."""
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"older", 1)
    arena.seal()
    park(arena, b"newer", 2)
    arena.seal()
    arena.close()
    path = tmp_path / NAME
    good = path.read_bytes()
    refused = 0
    used = [*range(96), *range(4096, 4096 + 180), *range(8192, 8192 + 180)]
    for offset in used:
        data = bytearray(good)
        data[offset] ^= 0x40
        path.write_bytes(data)
        try:
            arena = Arena.open(dir_fd, NAME, sealed_only=True)
        except DataLoss:
            refused += 1
            continue
        if arena.meta is not None:
            try:
                arena.verify()
            except DataLoss:
                refused += 1
            else:
                with arena.payload() as payload:
                    expected = {1: b"older", 2: b"newer"}[arena.meta.n_tokens]
                    assert bytes(payload) == expected
        arena.close()
    assert refused > 100


def test_cut_off_and_foreign_files_are_refused(dir_fd: int, tmp_path: Path) -> None:
    path = tmp_path / NAME
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"state")
    arena.close()
    good = path.read_bytes()
    cases = {
        "empty": b"",
        "short": good[:100],
        "one byte less": good[:-1],
        "longer": good + b"x",
        "magic": b"NOTMINE!" + good[8:],
        "zeros": bytes(len(good)),
    }
    for name, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(DataLoss):
            Arena.open(dir_fd, NAME, sealed_only=False)
        assert path.read_bytes() == data, name
    path.unlink()
    with pytest.raises(DataLoss):
        Arena.open(dir_fd, NAME, sealed_only=False)


def test_links_pipes_and_hard_links_are_refused(dir_fd: int, tmp_path: Path) -> None:
    arena = Arena.create(dir_fd, "real.kv", 4096)
    park(arena, b"state")
    arena.close()
    path = tmp_path / NAME
    path.symlink_to(tmp_path / "real.kv")
    with pytest.raises(DataLoss):
        Arena.open(dir_fd, NAME, sealed_only=False)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataLoss):
        Arena.open(dir_fd, NAME, sealed_only=False)
    path.unlink()
    os.link(tmp_path / "real.kv", path)
    with pytest.raises(DataLoss):
        Arena.open(dir_fd, NAME, sealed_only=False)


def test_another_owner_is_refused(
    dir_fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Arena.create(dir_fd, NAME, 4096).close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(DataLoss, match="user"):
        Arena.open(dir_fd, NAME, sealed_only=False)


def test_a_file_that_shrinks_behind_our_back_is_noticed(dir_fd: int, tmp_path: Path) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"state")
    os.truncate(tmp_path / NAME, 5000)
    with pytest.raises(DataLoss, match="cut off"):
        arena.payload()
    arena.close()


def test_a_full_file_system_leaves_the_state(dir_fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(dir_fd, NAME, 100 * fmt.GROW_BYTES)
    park(arena, b"one")

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted) as caught:
        arena.begin(50)
    assert caught.value.reason == "disk_full"
    assert caught.value.details["need_bytes"] == fmt.GROW_BYTES
    assert caught.value.details["free_bytes"] > 0
    with pytest.raises(ResourceExhausted):
        Arena.create(dir_fd, "other.kv", 4096)
    assert "other.kv" not in os.listdir(dir_fd)
    monkeypatch.undo()
    assert reopened(dir_fd)[1] == b"one"
    park(arena, b"two")
    assert reopened(dir_fd)[1] == b"two"
    arena.close()


def test_an_arena_that_is_held_stays_mapped_until_the_last_release(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"one")
    arena.hold()
    assert arena.free_spare() == 0
    arena.close()
    assert arena.seal(), "the sealing thread can still work"
    arena.release()
    with pytest.raises(ValueError, match="released"):
        arena.seal()


def test_a_view_outlives_its_arena(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    park(arena, b"one")
    payload = arena.payload()
    arena.close()
    assert bytes(payload) == b"one"
    with pytest.raises(TypeError):
        payload[0] = 1
    payload.release()


def test_a_long_key_fits_the_header_and_a_giant_one_is_refused(dir_fd: int) -> None:
    arena = Arena.create(dir_fd, NAME, 4096)
    long_key = ConversationKey("p" * 64, "a" * 64, "c" * 64)
    arena.begin(1).release()
    arena.commit(ParkedMeta(long_key, "m" * 64, "b" * 64, "f16", "p" * 64, 0, 1, 1))
    assert reopened(dir_fd)[0] is not None
    arena.begin(1).release()
    with pytest.raises(Internal):
        arena.commit(ParkedMeta(long_key, "m" * 5000, "b", "f16", "", 0, 1, 1))
    arena.close()
