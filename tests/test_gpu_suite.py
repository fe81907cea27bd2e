"""The script for CUDA hosts, tried on a cpu device: it goes on after failures, and tells."""

from __future__ import annotations

import importlib
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
def script() -> Iterator[ModuleType]:
    yield importlib.import_module("gpu_suite")
    for name in ("gpu_suite", "gpu_summary"):
        sys.modules.pop(name, None)


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
    figure_row = sys.modules["gpu_summary"].figure_row
    assert figure_row(figure) == "| a switch | 12.35 ms | <= 10 ms | **missed** | why |"
    missing = figure | {"value": None, "reached": None, "wanted": None}
    assert figure_row(missing) == "| a switch | - |  |  | why |"


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


def commands(suite: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a step would run."""
    asked: list[list[str]] = []
    monkeypatch.setattr(suite, "step", lambda name, command, limit_s: asked.append(command))
    suite.bench(name, 100.0)
    (command,) = asked
    return command[command.index("bench") + 1 :]


def test_three_steps_are_the_same_bench(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.model = Path("model.gguf")
    suite.device = "cuda:0"
    usual = ["pipeline", "--device", "cuda:0"]
    for name, own in {
        "pipeline": ["--grid"],
        "layers": ["--random", "8B", "--batch", "512"],
        "real": ["--model", "model.gguf"],
    }.items():
        command = commands(suite, name, monkeypatch)
        written = ["--json", str(suite.scratch / f"{name}.json")]
        drawn = ["--plot", str(suite.out / f"{name}.png")]
        assert command == [*usual, *own, *written, *drawn, "--seconds", "85"]
    assert commands(suite, "leak", monkeypatch)[:4] == ["leak", "--device", "cuda:0", "--json"]
    suite.device = "cpu"
    assert "8B" not in commands(suite, "layers", monkeypatch)


def test_a_real_model_is_named_or_lies_there(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.real_model() is None
    (tmp_path / ".models").mkdir()
    for name, size in {"a": 5, "b": 9, "c": 7}.items():
        (tmp_path / ".models" / f"{name}.gguf").write_bytes(bytes(size))
    assert script.real_model() == tmp_path / ".models" / "b.gguf"
    monkeypatch.setenv("MODEL", str(tmp_path / "other.gguf"))
    assert script.real_model() == tmp_path / "other.gguf"


def run_script(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    usual = {key: value for key, value in os.environ.items() if key not in ("WHEELS", "OUT")}
    command = [sys.executable, str(SCRIPT), "--device", "cpu", *flags]
    return subprocess.run(command, env=usual | env, capture_output=True, text=True)


def test_a_model_that_is_not_there_is_told_before_anything_is_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_script("--out", str(out), MODEL=str(tmp_path / "none.gguf"))
    assert done.returncode == 2
    assert "none.gguf is no file" in done.stderr
    assert not out.exists()


@pytest.mark.real
@pytest.mark.parametrize("name", ["parallel", "pipeline", "layers"])
def test_a_bench_runs_from_a_bare_tree(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_script("--only", name, "--out", str(out), "--no-pictures", "--minutes", "1")
    results = json.loads((out / "results.json").read_text())
    assert results[name]["figures"], done.stdout
    assert len(list(out.iterdir())) <= FILES_MAX
    summary = (out / "summary.md").read_text()
    assert f"## {name} on cpu" in summary
    assert results[name]["headline"] in summary
