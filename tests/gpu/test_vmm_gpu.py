"""Device memory that sleeps, for real."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def timed(rig: Rig, capsys: pytest.CaptureFixture[str]) -> Callable[[str], list[dict[str, Any]]]:
    """``timed("sizes")``: rows of ``vmm_timing``, which are printed: they are what this is for."""

    def run(what: str) -> list[dict[str, Any]]:
        said = rig.run("vmm_timing", what)
        with capsys.disabled():
            print(f"\n{said}")  # noqa: T201
        return [json.loads(line) for line in said.splitlines()]

    return run


def test_a_wake_runs_at_the_rate_of_pinned_copies(
    timed: Callable[[str], list[dict[str, Any]]],
) -> None:
    _, *rows = timed("sizes")
    large = [row for row in rows if row["mib"] >= 600 and row["blocks"] == 1]
    assert len(large) == 2
    for row in large:
        assert row["sleep_ms"] <= 2.0, row
        assert row["rested_percent"] >= 90, row
        assert row["wake_percent"] >= 80, row


def test_a_state_that_comes_back_beside_a_wake_waits_for_two_pieces_of_it(
    timed: Callable[[str], list[dict[str, Any]]],
) -> None:
    rates, *rows = timed("pieces")
    assert len(rows) > 3
    for row in rows:
        if 0 < row["piece_mib"] <= 16:
            pieces_ms = 2 * row["piece_mib"] * MIB / rates["in_gb_s"] / 1e6
            # A thread that has waited, and the next copy of it, take their time.
            allowed_ms = row["small_alone_ms"] + pieces_ms + 1.0
            assert row["gathered_ms"] <= allowed_ms, row
        assert row["wake_beside_gathered_ms"] <= row["rested_ms"] + 3.0, row
