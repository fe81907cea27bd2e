"""Writing a GGUF anew in another quantisation, and the probe that the command line asks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_models import Spec, make_model

from vram_conductor.protocol.errors import Code, FailedPrecondition, InvalidArgument
from vram_conductor.worker import probe
from vram_conductor.worker.llama.requantise import requantise

PROBE = [sys.executable, "-m", "vram_conductor.worker.probe"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(Spec(), tmp_path_factory.mktemp("models"))


def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROBE, *arguments], capture_output=True, text=True, timeout=120)


def test_a_requantised_model_can_be_used(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "q8.gguf"
    requantise(str(tiny), str(target), "q8_0")
    assert 0 < target.stat().st_size < tiny.stat().st_size
    before, after = probe.probe_models([str(tiny), str(target)], 256, "f16", None)
    assert after["info"]["arch"] == before["info"]["arch"]
    assert after["pool_bytes"] == before["pool_bytes"]
    assert 0 < after["weights_bytes"] < before["weights_bytes"]


def test_an_unknown_kind(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="q4_0, q8_0"):
        requantise(str(tiny), str(tmp_path / "x"), "q99")
    assert not (tmp_path / "x").exists()


def test_a_source_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model")
    with pytest.raises(FailedPrecondition) as caught:
        requantise(str(tmp_path / "text"), str(tmp_path / "x"), "q8_0")
    assert caught.value.reason == "requantise_failed"
    assert caught.value.info.code == Code.FAILED_PRECONDITION
    done = asked("requantise", str(tmp_path / "text"), str(tmp_path / "x"))
    assert done.returncode == 1
    assert "could not requantise" in done.stderr.splitlines()[-1]


def test_the_host_as_json() -> None:
    done = asked("host")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    assert value["build"].startswith("llama-cpp-python-")
    assert value["threads"] >= 1
    assert value["memory_bytes"] > 0
    assert isinstance(value["gpus"], list)
    assert bool(value["gpus"]) != bool(value["gpu_problem"])


def test_estimates_as_json(tiny: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such.gguf")
    done = asked("estimate", str(tiny), missing, "--n-ctx", "1000000", "--fit-bytes", str(1 << 30))
    assert done.returncode == 0, done.stderr
    answer, failed = json.loads(done.stdout)
    trained = answer["info"]["n_ctx_train"]
    assert answer["n_ctx"] == trained
    assert answer["fit_cells"] >= trained
    assert failed["error"]["reason"] == "no_such_model"
    assert failed["path"] == missing
