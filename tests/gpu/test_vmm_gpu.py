"""Device memory that sleeps, for real."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from vmm_rig import TESTS, Rig
from vmm_scenes import SCENES

MIB = 1 << 20


@pytest.fixture
def rig(preload_library: Path) -> Rig:
    return Rig(preload_library, {"LD_PRELOAD": str(preload_library), "PYTHONPATH": path_of_tests()})


def path_of_tests() -> str:
    """The modules of the tests, and what the interpreter has been given already."""
    return ":".join(part for part in (str(TESTS), os.environ.get("PYTHONPATH", "")) if part)


@pytest.mark.parametrize("name", list(SCENES))
def test_scene(rig: Rig, name: str) -> None:
    rig.run("vmm_scenes", name)


def test_a_gigabyte_comes_and_goes_a_hundred_times(rig: Rig, used_bytes: Callable[[], int]) -> None:
    before = used_bytes()
    rig.run("vmm_long", "100", "1024")
    assert used_bytes() - before < 4 * MIB


def test_kernels_compute_the_same_after_a_wake(rig: Rig) -> None:
    """With other people's kernels, where CuPy is there."""
    pytest.importorskip("cupy")
    rig.run("vmm_kernels")


def test_a_wake_runs_at_the_rate_of_pinned_copies(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    said = rig.run("vmm_timing")
    with capsys.disabled():
        print(f"\n{said}")  # noqa: T201 - the figures are what this is for
    rows = [json.loads(line) for line in said.splitlines()]
    large = [row for row in rows if row.get("mib", 0) >= 600 and row["blocks"] == 1]
    assert len(large) == 2
    for row in large:
        assert row["sleep_ms"] <= 2.0, row
        assert row["rested_percent"] >= 90, row
        assert row["wake_percent"] >= 80, row
    # What is copied meanwhile gets its turn long before the end.
    (beside,) = [row for row in rows if "beside_mib" in row]
    assert beside["small_beside_ms"] < 0.7 * beside["wake_ms"], beside
