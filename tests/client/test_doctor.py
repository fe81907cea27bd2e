"""``conductor doctor``: what it finds, and what it says."""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_broker import ScriptedBroker

from vram_conductor.client import cli, doctor, probing
from vram_conductor.client.doctor import devices, software
from vram_conductor.client.doctor_report import (
    Finding,
    device_findings,
    host_findings,
    render,
    sleep_findings,
)
from vram_conductor.protocol.config import Config, DeviceConfig
from vram_conductor.protocol.errors import FailedPrecondition, Internal

GIB = 1 << 30


def host(**fields: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "build": "llama-cpp-python-0.3.36",
        "gpu_offload": False,
        "threads": 8,
        "memory_bytes": 32 * GIB,
        "shm_total_bytes": 16 * GIB,
        "shm_free_bytes": 15 * GIB,
        "memlock_bytes": None,
        "gpus": [],
        "gpu_problem": "no NVIDIA driver here",
        "sleep": None,
    }
    return whole | fields


def gpu(index: int = 0, total: int = 8 * GIB, used: int = GIB) -> dict[str, Any]:
    return {
        "device": f"cuda:{index}",
        "name": "Some GPU",
        "total_bytes": total,
        "reserved_bytes": GIB // 2,
        "used_bytes": used,
    }


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.state for finding in findings}


# --- pure -------------------------------------------------------------------------------------


def test_a_box_without_a_gpu_is_no_problem() -> None:
    assert states(host_findings(host())) == {"llama.cpp": "ok", "gpu": "note", "shm": "ok"}


def test_a_gpu_that_the_library_was_not_built_for() -> None:
    found = host_findings(host(gpus=[gpu()]))
    assert [(item.topic, item.state) for item in found[1:3]] == [("gpu", "ok"), ("gpu", "problem")]
    assert "6.50 GiB free of 8.00 GiB" in found[1].text
    assert found[2].text.endswith("CMAKE_ARGS=-DGGML_CUDA=on make setup")
    built = host_findings(host(gpus=[gpu()], gpu_offload=True))
    assert "problem" not in states(built).values()


def test_how_the_memory_of_a_gpu_changes_hands() -> None:
    def said(config: Config, **fields: Any) -> list[tuple[str, str]]:
        found = sleep_findings(config, host(**fields))
        return [(item.state, item.text) for item in found]

    usable = {"path": "/venv/lib/vmm.so", "why": ""}
    missing = {"path": "", "why": "no C compiler; apt-get install gcc"}
    assert said(Config(), sleep=None) == []
    ((state, text),) = said(Config(), gpus=[gpu()], sleep=usable)
    assert (state, text.partition(" (")[0]) == ("ok", "cuda:0: vmm-sleep")
    ((state, text),) = said(Config(), gpus=[gpu()], sleep=missing)
    assert state == "note"
    assert text.startswith("cuda:0: state-swap")
    assert text.endswith(missing["why"])
    config = Config(
        device=[
            DeviceConfig(id="cuda:0", kind="cuda", sleep="off"),
            DeviceConfig(id="cuda:1", kind="cuda", managed=False),
        ]
    )
    ((state, text),) = said(config, gpus=[gpu(0), gpu(1), gpu(2)], sleep=usable)
    assert state == "ok"
    assert "state-swap" in text
    assert "sleep = off" in text


def test_small_shared_memory() -> None:
    found = host_findings(host(shm_total_bytes=64 << 20, shm_free_bytes=64 << 20))
    assert states(found)["shm"] == "problem"
    assert "--shm-size" in found[-1].text


def test_devices_that_this_box_does_not_have() -> None:
    config = Config(
        device=[
            DeviceConfig(id="cuda:0", kind="cuda"),
            DeviceConfig(id="cuda:1", kind="cuda"),
            DeviceConfig(id="cuda:7", kind="cuda", managed=False),
            DeviceConfig(id="cpu", kind="cpu", capacity="64 GiB"),
            DeviceConfig(id="cpu:1", kind="cpu", capacity="1 GiB"),
        ]
    )
    found = device_findings(config, host(gpus=[gpu()]))
    assert [item.text.split()[0] for item in found] == ["cuda:1", "cpu:"]
    assert {item.state for item in found} == {"problem"}


def test_capacities() -> None:
    assert devices(Config(), host()) == [("cpu", 8 * GIB)]
    assert devices(Config(), host(gpus=[gpu()])) == [("cuda:0", 8 * GIB - GIB // 2)]
    config = Config(
        device=[
            DeviceConfig(id="cuda:0", kind="cuda", capacity="4 GiB", admission_percent=50),
            DeviceConfig(id="cuda:1", kind="cuda", capacity="64 GiB"),
            DeviceConfig(id="cuda:2", kind="cuda"),
            DeviceConfig(id="cpu", kind="cpu", capacity="3 GiB"),
        ]
    )
    gpus = [gpu(0), gpu(1)]
    assert devices(config, host(gpus=gpus)) == [
        ("cuda:0", 2 * GIB),
        ("cuda:1", 8 * GIB - GIB // 2),
        ("cpu", 3 * GIB),
    ]


def fit(**fields: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "device": "cpu",
        "capacity_bytes": 8 * GIB,
        "model": "some-model",
        "n_ctx_train": 8192,
        "weights_bytes": 90 << 20,
        "pool_bytes": 60 << 20,
        "fit_cells": 4096,
    }
    return whole | fields


@pytest.mark.parametrize("width", [80, 100])
def test_the_report_fits_into_the_terminal(width: int) -> None:
    findings = [*software(), *host_findings(host(gpus=[gpu()]))]
    fits = [
        fit(),
        fit(model="trained", fit_cells=8192),
        fit(model="huge", fit_cells=0),
        {"device": "cpu", "capacity_bytes": GIB, "model": "bad", "n_ctx_train": None}
        | {"error": {"message": "not a GGUF file: " + "many words " * 12}},
    ]
    drawn = render(findings, fits, 4096, width)
    assert max(map(len, drawn.splitlines())) <= width
    rows = {line.split()[3]: line for line in drawn.splitlines() if line.startswith("cpu")}
    assert rows["some-model"].endswith("4096")
    assert rows["trained"].endswith("8192 (its maximum)")
    assert rows["huge"].endswith("does not fit")
    assert "not a GGUF file" in drawn


def test_missing_packages_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("xxhash", "llama-cpp-python"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    notes = [item.text for item in software() if item.state == "note"]
    assert notes == [
        "for a worker llama-cpp-python, xxhash missing: in a clone of the project: make setup, or "
        "pip install '.[broker,worker]'"
    ]


# --- asking the worker's library --------------------------------------------------------------


def fake_python(folder: Path, body: str) -> str:
    script = folder / "python"
    script.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("import no_such_library_xyz", FailedPrecondition, "make setup"),
        ("raise ZeroDivisionError('a bug')", Internal, "ZeroDivisionError: a bug"),
        ("sys.exit(3)", Internal, "exit code 3, no output"),
    ],
)
def test_a_probe_that_fails_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: str,
    kind: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, body))
    with pytest.raises(kind, match=re.escape(text)):
        probing.probe("host")


def test_a_probe_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "import time; time.sleep(600)"))
    monkeypatch.setattr(probing, "PROBE_S", 0.2)
    with pytest.raises(Internal, match="no answer"):
        probing.probe("host")


@pytest.mark.real
def test_estimates_stay_within_the_training_and_find_the_largest(smollm2: Path) -> None:
    (answer,) = probing.estimates([smollm2], 100_000, fit_bytes=GIB)
    assert answer["n_ctx"] == answer["info"]["n_ctx_train"] == 8192
    assert answer["fit_cells"] == 8192
    missing, small = probing.estimates(
        [smollm2.with_name("no-such.gguf"), smollm2], 512, fit_bytes=answer["weights_bytes"]
    )
    assert missing["error"]["reason"]
    assert small["n_ctx"] == 512
    assert small["fit_cells"] == 0


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("VRAM_CONDUCTOR_CONFIG", raising=False)
    monkeypatch.setattr(doctor, "probe", lambda *_: host())
    monkeypatch.setattr(doctor, "what_fits", lambda *_: [fit()])


def run(capsys: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("quiet")
def test_a_healthy_box(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", broker.endpoint)
    code, value = run(capsys)
    assert code == 0
    found = {item["topic"]: item for item in value["findings"]}
    assert found["broker"]["state"] == "ok"
    assert broker.endpoint in found["broker"]["text"]
    assert value["fits"] == [fit()]


@pytest.mark.usefixtures("quiet")
def test_no_broker_is_a_note(short_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", f"ipc://{short_tmp}/nobody.ipc")
    code, value = run(capsys)
    assert code == 0
    found = {item["topic"]: item for item in value["findings"]}
    assert found["broker"]["state"] == "note"


@pytest.mark.usefixtures("quiet")
def test_a_broken_configuration_is_a_problem_once(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.toml"
    config.write_text("surprise = 1\n")
    code, value = run(capsys, "--config", str(config))
    assert code == 1
    assert [item["topic"] for item in value["findings"] if item["state"] == "problem"] == ["config"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("config", "reason", "code"),
    [
        ('[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "1 GiB"\n', "worker_missing", 1),
        ('[[device]]\nid = "cpu"\nkind = "cpu"\nmanaged = false\n', "worker_missing", 0),
        ("", "worker_missing", 0),
        ("", "probe_failed", 1),
    ],
)
@pytest.mark.parametrize("packages", [True, False])
def test_a_worker_that_cannot_run_is_a_problem_where_one_is_to_run(
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    config: str,
    reason: str,
    code: int,
    packages: bool,
) -> None:
    def missing(*_: str) -> Any:
        raise FailedPrecondition(reason, "the worker cannot run here; install it")

    def version(name: str) -> str:
        if name == "llama-cpp-python" and not packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    (short_tmp / "c.toml").write_text(
        f'[broker]\nclients = "ipc://{short_tmp}/nobody.ipc"\n{config}'
    )
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(doctor, "probe", missing)
    assert cli.main(["doctor", "--config", str(short_tmp / "c.toml")]) == code
    out = capsys.readouterr().out
    assert ("FAIL" in out) == bool(code)
    said = [word for word in ("install it", "for a worker llama-cpp") if word in out]
    assert len(said) == 1, "once"


@pytest.mark.real
def test_this_box(
    smollm2: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(short_tmp))
    monkeypatch.setenv("VRAM_CONDUCTOR_CLIENTS", f"ipc://{short_tmp}/nobody.ipc")
    code, value = run(capsys)
    assert code in (0, 1)
    fits = {item["model"]: item for item in value["fits"]}
    assert fits["smollm2-135m"]["weights_bytes"] > 80 << 20
