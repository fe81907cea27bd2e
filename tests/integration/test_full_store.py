"""No room for parked states, and states that break under a worker that lives: conversations go on,
what is computed again is said, and nobody else notices."""

from __future__ import annotations

import resource
import shutil
import struct
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf_models import Spec
from scene import MIB, Scene, model, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.values import Usage

SPEC = Spec(vocab="bytes", seed=72, n_ctx_train=16_384)
HISTORY, SHORT, MORE = some_tokens(400, 1), some_tokens(40, 3), some_tokens(3, 2)
HEADER_BYTES = 12288
SMALL_FILE_BYTES = HEADER_BYTES + 100_000
"""Any arena is longer: it is sized for the largest state of its agent."""


def two_agents() -> Scene:
    return Scene(StageDevice(capacity_bytes=64 * MIB, host_cap_bytes=32 * MIB))


def register(scene: Scene) -> None:
    """Two agents that share one slot: when one speaks, the other is parked."""
    for agent in ("victim", "other"):
        scene.conductor.register(agent, model(SPEC), n_ctx=1024)


@pytest.fixture(scope="module")
def parking() -> Iterator[Scene]:
    with two_agents() as scene:
        register(scene)
        yield scene


@contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Generator[None]:
    """A file system of this size at ``folder``."""
    folder.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    try:
        if not mounted:
            pytest.skip("mounting needs root")
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


@contextmanager
def no_room(scene: Scene) -> Generator[None]:
    """No file of the worker may be longer than this: to it that is a full disk."""
    pid, most = scene.worker_pid(), resource.RLIM_INFINITY
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, most))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


def whole(scene: Scene, record: list[int]) -> list[int]:
    """What the model says after ``record`` when all of it is computed at once."""
    ids = scene.run("victim", record, conversation="whole", max_tokens=6).ids
    scene.conductor.reset("victim", "whole")
    return ids


def files(scene: Scene) -> list[Path]:
    """The victim's parked state."""
    found = [path for path in scene.stage.arena_dir.rglob("*.kv") if path.is_file()]
    return [path for path in found if b"victim" in path.read_bytes()[:HEADER_BYTES]]


def refilled(usage: Usage, tokens: int, reason: str) -> None:
    """All of a conversation of so many tokens was computed again, and that is said."""
    assert (usage.swap.restored, usage.reused_tokens) == (False, 0)
    # The last token never had KV.
    assert (usage.reprefilled_tokens, usage.reprefill_reason) == (tokens - 1, reason)


def restored(usage: Usage) -> None:
    assert (usage.swap.restored, usage.reprefilled_tokens) == (True, 0)


def test_where_nothing_can_be_parked_all_go_on(parking: Scene) -> None:
    before, worker = parking.calm_books(), parking.worker_pid()
    with no_room(parking):
        first = parking.run("victim", HISTORY, max_tokens=4)
        assert not files(parking)
        parking.run("other", SHORT, max_tokens=4)
        second = parking.run("victim", MORE, max_tokens=6)
        refilled(second.usage, len(HISTORY) + 4, "not_parked: disk_full")
        refilled(parking.run("other", MORE, max_tokens=4).usage, 44, "not_parked: disk_full")
    assert second.ids == whole(parking, [*HISTORY, *first.ids, *MORE])
    # With room again all is as ever.
    parking.run("victim", MORE, max_tokens=2)
    assert files(parking)
    parking.run("other", MORE, max_tokens=2)
    restored(parking.run("victim", MORE, max_tokens=2).usage)
    assert parking.worker_pid() == worker
    parking.settled(before)


def test_shared_memory_that_others_have_filled() -> None:
    scene = two_agents()
    folder = scene.stage.arena_dir
    with tmpfs(folder, 8 * MIB), scene:
        register(scene)
        worker = scene.worker_pid()
        parts = (SHORT, MORE, MORE)
        expected = [scene.run("other", ids, max_tokens=4).ids for ids in parts]
        scene.conductor.reset("other")
        found = [scene.run("other", SHORT, max_tokens=4).ids]
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(folder).free - 160 * 1024))
        scene.run("victim", HISTORY, max_tokens=4)
        for _ in range(2):
            # The small state has room, the large one has not.
            other = scene.run("other", MORE, max_tokens=4)
            restored(other.usage)
            found.append(other.ids)
            usage = scene.run("victim", MORE, max_tokens=4).usage
            assert usage.reprefill_reason == "not_parked: disk_full"
        assert found == expected
        ballast.unlink()
        scene.run("victim", MORE, max_tokens=4)
        restored(scene.run("other", MORE, max_tokens=4).usage)
        restored(scene.run("victim", MORE, max_tokens=4).usage)
        assert scene.worker_pid() == worker


def scribble(path: Path) -> None:
    """Nonsense where the state of both halves begins: restoring it fails."""
    with path.open("r+b") as file:
        (half_bytes,) = struct.unpack_from("=16xQ", file.read(HEADER_BYTES))
        for half in range(2):
            file.seek(HEADER_BYTES + half * half_bytes)
            file.write(b"\xff" * 64)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES)


@pytest.mark.parametrize(("harm", "reason"), [(scribble, "state_failed"), (cut, "state_corrupt")])
def test_a_state_that_breaks_under_a_living_worker(
    parking: Scene, harm: Callable[[Path], None], reason: str
) -> None:
    for agent in ("victim", "other"):
        parking.conductor.reset(agent)
    worker = parking.worker_pid()
    first = parking.run("victim", HISTORY, max_tokens=4)
    expected = whole(parking, [*HISTORY, *first.ids, *MORE])
    parking.run("other", HISTORY, max_tokens=4)
    for path in until(lambda: files(parking), "it is parked"):
        harm(path)
    second = parking.run("victim", MORE, max_tokens=6)
    assert second.ids == expected
    refilled(second.usage, len(HISTORY) + 4, reason)
    restored(parking.run("other", MORE, max_tokens=4).usage)
    assert parking.worker_pid() == worker
