"""Sleep and wake on a real GPU, under the core: the same tokens, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
UNIT = 2 * MIB
SCENES = Path(__file__).parent / "residency_scenes.py"
CODE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture
def scene(run_preloaded: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """``scene(name, …)``: its figures."""

    def run(*arguments: str) -> dict[str, Any]:
        done = run_preloaded(CODE, str(SCENES), *arguments)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.mark.parametrize("lanes", ["inline", "lockstep"])
def test_tokens_are_the_same_over_hundreds_of_random_switches(
    scene: Callable[..., dict[str, Any]], lanes: str
) -> None:
    found = scene("tokens", "300", lanes)
    assert not found["wrong"], found
    assert found["switches"] >= 295, found
    assert found["rates"]["wake_weights"]["count"] >= 290, found
    assert found["rates"]["load"]["count"] == 3, "something was loaded twice"
    assert found["variety"] > 20, "models that repeat themselves prove nothing"


def test_a_thousand_switches_leave_nothing_behind(
    scene: Callable[..., dict[str, Any]], random_model: Callable[[str], Path]
) -> None:
    folder = random_model("0.36B").parent
    found = scene("leak", "1000", "lockstep", str(folder))
    assert found["switches"] >= 990, found
    assert abs(found["growth_bytes"]) <= 4 * MIB, found
    assert found["left_bytes"] <= 4 * MIB, found
    # Kernels that are loaded late, and tables of the host memory that backups pin: promised.
    assert found["over_budget_bytes"] <= 0, found
    assert found["pinned_left_bytes"] == 0, found


def test_a_model_that_is_unloaded_in_its_sleep_gives_everything_back(
    scene: Callable[..., dict[str, Any]], random_model: Callable[[str], Path]
) -> None:
    found = scene("asleep", "inline", str(random_model("0.36B").parent))
    assert found["asleep"] == [True, False], found
    # Its backup is as large as its tensors; on the device they are rounded up to the unit.
    assert found["given_back_bytes"] == found["backup_bytes"], found
    assert 0 <= found["weights_bytes"] - found["backup_bytes"] < UNIT, found
    assert found["all_asleep_bytes"] <= 4 * MIB, found
    assert found["left_bytes"] <= 4 * MIB, found
