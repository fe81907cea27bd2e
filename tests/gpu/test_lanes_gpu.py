"""Lanes on a real GPU: models that compute at once, and beside moves, say what they say alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).parent / "lanes_scenes.py"
CODE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


@pytest.fixture
def scene(
    run_preloaded: Callable[..., Any], random_model: Callable[[str], Path]
) -> Callable[..., dict[str, Any]]:
    """``scene(name)``: its figures."""

    def run(name: str) -> dict[str, Any]:
        done = run_preloaded(CODE, str(SCENES), name, str(random_model("0.36B").parent))
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        print(json.dumps(found, indent=1))  # noqa: T201 - the figures are the result
        return found

    return run


def test_three_models_at_once_say_the_same_and_take_half_the_time(
    scene: Callable[..., dict[str, Any]],
) -> None:
    found = scene("together")
    assert found["same"], found
    in_turn = found["free, in turn"]["tokens_s"]
    assert found["free, at once"]["tokens_s"] >= 1.9 * in_turn, found
    # What handing every token over between threads costs one model that runs alone.
    assert in_turn >= 0.95 * found["inline, in turn"]["tokens_s"], found


def test_a_stream_goes_on_beside_two_models_that_switch_without_pause(
    scene: Callable[..., dict[str, Any]],
) -> None:
    found = scene("stream")
    assert found["same"], found
    assert found["switches"] > 10, found
    assert found["share"] >= 0.7, found
    assert found["p95_ms"] <= 12, found
