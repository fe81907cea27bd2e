"""Pinned arenas on a real GPU: what they are worth, and that they survive their process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore

HERE = Path(__file__).parent
MIB = 1 << 20
SCENE_S = 300.0
NEED_BYTES = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def enough_shared_memory() -> None:
    info = os.statvfs("/dev/shm")
    free_bytes = info.f_bavail * info.f_frsize
    if free_bytes < NEED_BYTES:
        pytest.skip(f"/dev/shm has {free_bytes} bytes free, {NEED_BYTES} are needed (--shm-size)")


def figures(output: str) -> dict[str, Any]:
    """What a scene printed last; shown with ``-s``."""
    line = output.splitlines()[-1]
    sys.stdout.write(f"\n{line}\n")
    return dict(json.loads(line))


def scene(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "pin_scenes.py"), name],
        capture_output=True,
        text=True,
        timeout=SCENE_S,
    )
    assert done.returncode == 0, done.stderr
    return figures(done.stdout)


@pytest.fixture(scope="module")
def rates(cuda: str) -> dict[str, Any]:
    return scene("rates")


def test_a_registered_arena_copies_like_memory_that_was_allocated_pinned(
    rates: dict[str, Any],
) -> None:
    for side in ("in", "out"):
        assert rates["registered"][side] >= 0.9 * rates["host_alloc"][side], rates
        assert rates["registered"][side] > 1.5 * rates["pageable"][side], rates
        assert rates["across_pieces"][side] >= 0.8 * rates["host_alloc"][side], rates


def test_pinning_gives_back_what_it_took_of_the_device(rates: dict[str, Any]) -> None:
    assert rates["device_bytes_kept"] <= 4 * MIB, rates


def test_a_copy_over_memory_that_is_pinned_in_part_is_what_must_never_happen(cuda: str) -> None:
    found = scene("mixture")
    assert found["spanning"] == [0, 0] or not found["spans"], found
    assert found["plain"] == 0, "an error of a copy does not stick"
    assert found["whole"] or not found["spans"], found


def test_small_work_goes_on_while_memory_is_pinned(cuda: str) -> None:
    """Pieces are there for this: a decode step of somebody else waits for one at most."""
    found = scene("others")
    if found["spans"]:
        assert found["pieces"]["max_ms"] <= max(25.0, found["idle"]["max_ms"] * 2), found


BENCH = "from vram_conductor.worker.bench.parking import main; main()"


@pytest.fixture(scope="module")
def plain(cuda: str, random_model: Callable[[str], Path]) -> dict[str, Any]:
    """The bench without the preload library: every piece of a state is waited for."""
    done = subprocess.run(
        [sys.executable, "-c", BENCH, str(random_model("1.2B")), "--device", cuda],
        capture_output=True,
        text=True,
        timeout=SCENE_S,
    )
    assert done.returncode == 0, done.stderr
    return figures(done.stdout)


def test_parking_and_resuming_reach_their_share_of_the_pinned_rate(
    cuda: str,
    random_model: Callable[[str], Path],
    rates: dict[str, Any],
    plain: dict[str, Any],
    run_preloaded: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """128 MiB of KV: out at >= 75 %, in at >= 50 % of the pinned rate."""
    done = run_preloaded(BENCH, str(random_model("1.2B")), "--device", cuda)
    found = figures(done.stdout)
    assert found["pinned"]
    assert found["gathered"]
    assert not plain["gathered"]
    assert found["park"]["copy_gb_s"] >= 0.75 * rates["host_alloc"]["out"], found
    assert found["resume"]["copy_gb_s"] >= 0.5 * rates["host_alloc"]["in"], found
    # Cells of two conversations that take turns: one copy per tensor instead of one per cell.
    beside, before = found["side_by_side"], plain["side_by_side"]
    assert beside["park"]["get_ms"] < 0.5 * before["park"]["get_ms"], (beside, before)


def test_pieces_copied_together_are_the_same_bytes(
    cuda: str,
    random_model: Callable[[str], Path],
    run_preloaded: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = (
        f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import pin_scenes; "
        "pin_scenes.say(json.dumps(pin_scenes.gathered(sys.argv[1])))"
    )
    found = figures(run_preloaded(code, str(random_model("0.5B"))).stdout)
    assert found["mechanism"] == "vmm-sleep"
    checks = ("same_out", "same_in", "untouched", "in_a_row")
    assert all(found[name] for name in checks), found


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def test_a_worker_that_is_killed_while_the_device_writes_leaves_the_state_before(
    cuda: str, shared_folder: Path
) -> None:
    for parks in (4, 5, 7):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "pin_scenes.py"), "killed", str(shared_folder / "arenas")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        while int(process.stdout.readline()) < parks:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
        store = KVStore(ArenaDir(shared_folder / "arenas", "cuda:0", 10.0), 1 << 32)
        found = store.read(ConversationKey("local", "agent", "main"))
        assert found is not None
        with found[1] as payload:
            stamp = found[0].tokens_hash
            assert stamp >= parks
            assert bytes(payload[:4096]) == bytes([stamp]) * 4096
            assert bytes(payload[-4096:]) == bytes([stamp]) * 4096
        store.close()
