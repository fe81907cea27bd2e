"""Estimates against NVML: never under, over by little, and every byte on the card accounted for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scene import Scene

MIB = 1 << 20
POINTS_MIN = 10
GRID_S = 60
UNATTRIBUTED_BYTES = 4 * MIB


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
        print(f"{name:36} used {row['used_bytes'] / MIB:8.1f} MiB, promised {over:+.1f}")
    print(f"base {found['base_bytes'] / MIB:.1f} MiB; {found['notes']}")
    return found


def test_every_point_is_promised_enough_and_little_more(grid: dict[str, Any]) -> None:
    assert len(grid["rows"]) >= POINTS_MIN
    wrong = []
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


def settled(scene: Scene, wanted: Callable[[Any], bool]) -> Any:
    """The device's STATUS once it shows what was ``wanted``."""
    found = {}

    def look() -> bool:
        found["device"] = scene.device()
        return wanted(found["device"])

    scene.wait(look, "the report of what is resident")
    return found["device"]


def resident(device: Any) -> dict[str, int]:
    return {line.key: line.bytes for line in device.resident}


def test_lines_add_up_to_what_nvml_shows(
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
) -> None:
    """Through broker and worker: own lines and NVML agree within 4 MiB with nothing loaded, with
    two models that have answered, and after both have gone. What others use stands still here."""
    before = used_bytes()
    scene = cuda_scene(capacity_bytes=0)
    paths = [random_model("0.36B"), random_model("0.5B")]
    device = settled(scene, lambda d: "base" in resident(d))
    others = before
    base = resident(device)["base"]
    assert abs(used_bytes() - others - base) <= UNATTRIBUTED_BYTES
    for at, path in enumerate(paths):
        scene.client.register(f"a{at}", path.name, n_ctx=8192)
        scene.client.decode(f"a{at}", prompt="hello " * 400, max_tokens=16).result()
    device = settled(scene, lambda d: sum(k.startswith("pool:") for k in resident(d)) == 2)
    lines = resident(device)
    print({key: size / MIB for key, size in lines.items()})
    assert sum(key.startswith("scratch:") for key in lines) == 2
    assert abs(used_bytes() - others - sum(lines.values())) <= UNATTRIBUTED_BYTES
    promised = {line.key: line.bytes for line in device.promised}
    assert all(promised.get(key, 0) >= size for key, size in lines.items() if key != "base")
    for at in range(len(paths)):
        scene.client.unregister(f"a{at}")
    device = settled(scene, lambda d: set(resident(d)) == {"base"})
    assert abs(used_bytes() - others - resident(device)["base"]) <= UNATTRIBUTED_BYTES
