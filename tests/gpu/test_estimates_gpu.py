"""Estimates against NVML: never under, over by little, and every byte on the card accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scene import Scene, some_tokens, until

from vram_conductor.protocol.status import DeviceStatus
from vram_conductor.worker.bench.grid_models import GRID_MODELS, make_grid_model
from vram_conductor.worker.growth import LATE_BYTES, STEP_BYTES

MIB = 1 << 20
POINTS_MIN = 10
GRID_S = 60
UNATTRIBUTED_MIB = 4


RunPreloaded = Callable[..., "subprocess.CompletedProcess[str]"]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


@pytest.fixture(scope="module")
def grid(cuda: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The grid of ``worker.bench.estimates``, in a process of its own."""
    command = [sys.executable, "-m", "vram_conductor.worker.bench", "estimates"]
    folder = tmp_path_factory.mktemp("grid-models")
    done = subprocess.run(
        [*command, "--device", cuda, "--folder", str(folder), "--seconds", str(GRID_S)],
        capture_output=True,
        text=True,
        timeout=2 * GRID_S,
        stdin=subprocess.DEVNULL,
        env=os.environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for row in found["rows"]:
        over = (row["promised_bytes"] - row["used_bytes"]) / MIB
        name = f"{row['model']} {row['n_ctx']} {row['kv_type']} x{row['slots']}"
        say(f"{name:36} used {row['used_bytes'] / MIB:8.1f} MiB, promised {over:+.1f}")
    say(f"base {found['base_bytes'] / MIB:.1f} MiB; {found['notes']}")
    return found


def test_every_point_is_promised_enough_and_little_more(grid: dict[str, Any]) -> None:
    assert len(grid["rows"]) >= POINTS_MIN
    wrong: list[tuple[Any, Any]] = []
    for row in grid["rows"]:
        over = row["promised_bytes"] - row["used_bytes"]
        if not 0 <= over <= max(16 * MIB, 0.02 * row["used_bytes"]):
            wrong.append((over / MIB, row))
    assert not wrong


def test_architectures_and_shapes_differ(grid: dict[str, Any]) -> None:
    rows = grid["rows"]
    assert len({row["arch"] for row in rows}) >= 4
    assert {row["kv_type"] for row in rows} == {"f16", "q8_0"}
    assert min(row["n_ctx"] for row in rows) <= 2048
    assert max(row["n_ctx"] for row in rows) >= 131_072
    assert {1, 8} <= {row["slots"] for row in rows}


def test_everything_comes_back(grid: dict[str, Any]) -> None:
    assert not grid["failures"]


def resident(device: DeviceStatus) -> dict[str, int]:
    return {line.key: line.bytes for line in device.resident}


def pools(device: DeviceStatus) -> int:
    return sum(key.startswith("pool:") for key in resident(device))


def unaccounted(device: DeviceStatus, own_bytes: int) -> float:
    """In MiB: what NVML shows beyond the lines."""
    lines = resident(device)
    shown = {key: size / MIB for key, size in lines.items()}
    say(f"{shown} in use: {own_bytes / MIB} MiB")
    return (own_bytes - sum(lines.values())) / MIB


def test_lines_add_up_to_what_nvml_shows(
    cuda: str,
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
) -> None:
    """Through broker and worker: own lines and NVML agree within 4 MiB with nothing loaded, with
    two models that have answered, and after both have gone. What others use stands still here."""
    paths = [random_model("0.36B"), random_model("0.5B")]
    others = used_bytes()
    scene = cuda_scene()

    def seen(what: str, wanted: Callable[[DeviceStatus], bool]) -> DeviceStatus:
        until(lambda: wanted(scene.device(cuda)), what)
        return scene.device(cuda)

    device = seen("it reports its base", lambda d: "base" in resident(d))
    assert abs(unaccounted(device, used_bytes() - others)) <= UNATTRIBUTED_MIB
    for at, path in enumerate(paths):
        scene.conductor.register(f"a{at}", str(path), n_ctx=8192)
        scene.run(f"a{at}", some_tokens(700, at, 40_000), max_tokens=16)
    device = seen("both are resident", lambda d: pools(d) == len(paths))
    assert sum(key.startswith("scratch:") for key in resident(device)) == len(paths)
    assert abs(unaccounted(device, used_bytes() - others)) <= UNATTRIBUTED_MIB
    assert abs(device.unattributed_bytes) <= UNATTRIBUTED_MIB * MIB
    promised = {line.key: line.bytes for line in device.promised.lines}
    kept = promised["base"] - resident(device)["base"]
    assert STEP_BYTES <= kept <= LATE_BYTES, "more is promised than the process has taken so far"
    say(f"{kept / MIB} MiB more are kept for what is loaded late")
    found = {k: v for k, v in resident(device).items() if k != "base"}
    assert {k: promised.get(k, 0) for k in found} == found, "what was measured is what is promised"
    for at in range(len(paths)):
        scene.conductor.unregister(f"a{at}")
    device = seen("all has gone", lambda d: set(resident(d)) == {"base"})
    assert abs(unaccounted(device, used_bytes() - others)) <= UNATTRIBUTED_MIB


def test_a_recurrent_model_is_planned_off_the_device(
    cuda: str, run_preloaded: RunPreloaded, tmp_path: Path
) -> None:
    """llama.cpp allocates its caches in a dry run, too, when all of the cap may be in use."""
    small = next(model for model in GRID_MODELS if model.arch == "mamba")
    path = make_grid_model(replace(small, name="mamba-deep", n_layer=24), tmp_path)
    here = Path(__file__).parent
    code = f"import sys; sys.path.insert(0, {str(here)!r}); import dry_scenes; dry_scenes.main()"
    found = json.loads(run_preloaded(code, str(path)).stdout.splitlines()[-1])
    say(json.dumps(found))
    assert found["recurrent"] >= 4 * MIB
    assert found["on_device"] >= 4 * MIB, "otherwise this test sees nothing"
    assert found["on_host"] <= 2 * MIB
