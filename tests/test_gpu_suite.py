"""The script for CUDA hosts, tried on a cpu device: it goes on after failures, and tells."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_suite.py"
FILES_MAX = 8


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_suite", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up by name.
    sys.modules["gpu_suite"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def suite(script: ModuleType, tmp_path: Path) -> Iterator[Any]:
    found = script.Suite(tmp_path / "out", "cpu", 1.0)
    yield found
    found.log.close()
    shutil.rmtree(found.scratch, ignore_errors=True)


def test_a_step_that_fails_is_told_with_its_last_words(suite: Any) -> None:
    code = "import sys; print('the last words'); sys.exit(3)"
    outcome = suite.step("broken", [sys.executable, "-c", code], 30)
    assert (outcome.code, outcome.timed_out) == (3, False)
    good = suite.step("good", [sys.executable, "-c", "print('fine')"], 30)
    assert good.verdict == "ok"
    assert suite.finish() == 1
    summary = (suite.out / "summary.md").read_text()
    assert "| broken | failed (exit code 3) |" in summary
    assert "the last words" in summary
    assert "| good | ok |" in summary
    assert "fine" in (suite.out / "log.txt").read_text()


def test_a_step_that_hangs_is_ended_with_its_children(suite: Any, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    child = "import time; time.sleep(600)"
    code = (
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    suite.grace_s = 0.5
    began = time.monotonic()
    outcome = suite.step("hangs", [sys.executable, "-c", code], 3)
    assert outcome.timed_out
    assert outcome.verdict == "took too long"
    assert time.monotonic() - began < 60
    pid = int(pid_file.read_text())
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until, "its child still runs"


def test_a_figure_is_a_row_with_its_verdict(script: ModuleType) -> None:
    figure = {
        "what": "a switch",
        "value": 12.345,
        "unit": "ms",
        "wanted": 10.0,
        "relation": "<=",
        "reached": False,
        "note": "why",
    }
    assert script._row(figure) == "| a switch | 12.35 ms | <= 10 ms | **missed** | why |"
    missing = figure | {"value": None, "reached": None, "wanted": None}
    assert script._row(missing) == "| a switch | - |  |  | why |"


def test_time_that_is_not_used_is_for_the_others(
    script: ModuleType, suite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float] = {}
    monkeypatch.setattr(suite, "bench", lambda name, limit_s: limits.update({name: limit_s}))
    monkeypatch.setattr(suite, "tests", lambda limit_s: limits.update({"tests": limit_s}))
    suite.run(["tests", "parallel", "leak"])
    assert list(limits) == ["tests", "parallel", "leak"]
    assert limits["leak"] == pytest.approx(60, abs=2), "the others took none of theirs"
    assert sum(script.STEPS.values()) < 60 * script.MINUTES


@pytest.mark.real
def test_a_bench_runs_from_a_bare_tree(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--only", "parallel"]
    env = {key: value for key, value in os.environ.items() if key not in ("WHEELS", "OUT")}
    done = subprocess.run(
        [*command, "--out", str(out), "--no-pictures"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    results = json.loads((out / "results.json").read_text())
    assert results["parallel"]["figures"], done.stdout
    assert len(list(out.iterdir())) <= FILES_MAX
    assert "## parallel on cpu" in (out / "summary.md").read_text()
