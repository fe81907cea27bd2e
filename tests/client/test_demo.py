"""The demo: one whole run, and what it does when a claim does not hold."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vram_conductor.client import cli, demo, demo_acts
from vram_conductor.client.demo_acts import Acts
from vram_conductor.client.demo_models import DemoModel, cast, places
from vram_conductor.client.demo_outside import flip_bytes, kill, wait_dead
from vram_conductor.client.demo_script import names
from vram_conductor.client.output import Output
from vram_conductor.client.receipts import Receipts
from vram_conductor.client.stage import Stage, private_environment
from vram_conductor.protocol.config import load_config
from vram_conductor.protocol.errors import Unavailable

MIB = 1 << 20


# --- the whole of it --------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.usefixtures("smollm2")
def test_every_claim_holds_and_nothing_is_left_behind() -> None:
    before = stages()
    done = subprocess.run(
        [sys.executable, "-m", "vram_conductor.client.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=600,
        # What a user has set for his own conductor is not for this one.
        env={**os.environ, "VRAM_CONDUCTOR_BROKER_STATE_DIR": "/nowhere", "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    closing = done.stdout.partition("== receipts")[2].splitlines()
    rows = [line for line in closing if line.startswith("ok  ")]
    assert len(rows) == 14
    assert closing[-1] == "14 of 14 claims hold"
    assert "FAIL" not in done.stdout
    assert max(map(len, closing)) <= 100, "the closing table is readable"
    for text in ("kv_swap_evicted", "kv_swap_restored", "VRAM_LEDGER_DENY code=CAP", "SIGKILL"):
        assert text in done.stdout
    assert "coder> " in done.stdout
    assert stages() <= before


def stages() -> set[Path]:
    """The folders of demos; other tests have stages, too, with other sizes."""
    size = f"host_cap = {demo._HOST_BYTES}\n"
    configs = Path("/tmp").glob("vmc-*/conductor.toml")
    return {path.parent for path in configs if size in path.read_text()}


# --- a claim that does not hold ---------------------------------------------------------------


class FakeStage:
    """A stage that starts nothing and has a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoint = ""
        self.keep = False
        self.stopped = 0

    def __enter__(self) -> FakeStage:
        (self.folder / "log").write_text("what went wrong")
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopped += 1
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


class FakeConductor:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> FakeConductor:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeStage:
    made = FakeStage(tmp_path / "stage")
    made.folder.mkdir()
    model = DemoModel("m", tmp_path / "m.gguf", 90 * MIB, 40 * MIB, 30 * MIB)
    monkeypatch.setattr(demo, "Stage", lambda *_, **__: made)
    monkeypatch.setattr(demo, "Conductor", FakeConductor)
    monkeypatch.setattr(demo, "prepare", lambda *_, **__: [model, model])
    return made


def acts(monkeypatch: pytest.MonkeyPatch, *held: bool, error: BaseException | None = None) -> None:
    class FakeActs:
        def __init__(
            self, stage: object, conductor: object, receipts: Receipts, *_: object
        ) -> None:
            self._receipts = receipts

        def run(self, *_: object) -> None:
            for number, holds in enumerate(held):
                self._receipts.check(f"claim {number}", holds, f"figure {number}")
            if error is not None:
                raise error

    monkeypatch.setattr(demo, "Acts", FakeActs)


def test_all_hold(stage: FakeStage, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    acts(monkeypatch, True, True)
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("2 of 2 claims hold\n")
    assert not stage.folder.exists()


def test_one_does_not_hold(stage: FakeStage, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    acts(monkeypatch, True, False)
    assert cli.main(["demo"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL  claim 1  figure 1" in out
    assert out.endswith("1 of 2 claims hold\n")
    assert f"kept in {stage.folder}" in err
    assert (stage.folder / "log").read_text() == "what went wrong"


def test_json(stage: FakeStage, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    acts(monkeypatch, True, False)
    assert cli.main(["demo", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["passed"] is False
    assert value["kept"] == str(stage.folder)
    assert value["receipts"][1] == {"claim": "claim 1", "holds": False, "figures": "figure 1"}


def test_a_bug_keeps_the_log(
    stage: FakeStage, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    acts(monkeypatch, error=ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])
    assert f"kept in {stage.folder}" in capsys.readouterr().err
    assert stage.folder.exists()


def test_ctrl_c_leaves_nothing(
    stage: FakeStage, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    acts(monkeypatch, error=KeyboardInterrupt())
    assert cli.main(["demo"]) == 130
    assert "kept in" not in capsys.readouterr().err
    assert not stage.folder.exists()


def test_an_act_that_cannot_be_finished_is_a_claim_that_does_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    class Memory:
        def __init__(self, pid: int) -> None: ...

    def lost(self: Acts) -> None:
        self._receipts.stream("   coder> half an")
        raise Unavailable("worker_lost", "the worker was lost")

    monkeypatch.setattr(demo_acts, "PeakMemory", Memory)
    monkeypatch.setattr(Acts, "_worker_pid", lambda self: 0)
    monkeypatch.setattr(Acts, "_admit", lambda self, output: None)
    monkeypatch.setattr(Acts, "_refuse", lost)
    output = Output(json=False)
    receipts = Receipts(output)
    model = DemoModel("m", tmp_path, 1, 1, 1)
    scene: Any = SimpleNamespace()
    whole = Acts(scene, scene, receipts, cast([model, model]), (model, 8192), 1)
    whole.run(1, output)
    assert receipts.failed == 1
    assert capsys.readouterr().out == (
        "   coder> half an\n   [FAIL] refusal can be shown: the worker was lost\n"
    )


# --- its parts --------------------------------------------------------------------------------


def test_news_wait_for_the_end_of_a_streamed_line(capsys: Any) -> None:
    receipts = Receipts(Output(json=False))
    receipts.stream("   coder> one")
    thread = threading.Thread(target=lambda: receipts.say("worker died"))
    thread.start()
    thread.join()
    receipts.stream(" two")
    receipts.stream("\n")
    receipts.say("later")
    assert capsys.readouterr().out == "   coder> one two\n   worker died\n   later\n"


@pytest.mark.parametrize("width", [80, 100])
def test_the_closing_table_wraps_long_figures(width: int) -> None:
    receipts = Receipts(Output(json=True))
    receipts.check("a claim that is rather long, as claims go", True, "many figures " * 20)
    receipts.check("short", False, "x")
    lines = receipts.closing(width).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(lines).split().count("figures") == 20
    assert lines[-1].split() == ["FAIL", "short", "x"]


def test_names() -> None:
    assert names(["local/coder/main", "pool:ab@f16", "local/a/plan", "odd"]) == (
        "coder, a pool, a/plan, odd"
    )
    assert names(["local/coder"]) == "coder"


def test_the_stage_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "PATH": "/bin",
        "VRAM_CONDUCTOR_BROKER_CLIENTS": "x",
        "VRAM_CONDUCTOR_WORKER_ARENA_DIR": "y",
        "VRAM_CONDUCTOR_CONFIG": "z",
        "VRAM_CONDUCTOR_VMM_PIECE": "0",
    }
    assert private_environment(env) == {"PATH": "/bin", "VRAM_CONDUCTOR_VMM_PIECE": "0"}


@pytest.mark.parametrize("keep", [False, True])
def test_the_stage_keeps_its_folder_if_asked(keep: bool) -> None:
    stage = Stage()
    stage.arena_dir.mkdir()
    stage.keep = keep
    stage.supervisor.shutdown()
    stage.stop()
    assert stage.folder.exists() == keep
    assert not stage.arena_dir.exists()
    shutil.rmtree(stage.folder, ignore_errors=True)


def test_the_demos_places_are_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_CONDUCTOR_WORKER_MODELS_DIR", '/a "quoted" folder')
    model = DemoModel("m", tmp_path / "m.gguf", 1, 1, 1)
    config = tmp_path / "c.toml"
    config.write_text(f"[worker]\n{places([model, model])}")
    worker = load_config(config).worker
    assert worker.model_dirs == [str(tmp_path)]
    assert worker.models_dir == '/a "quoted" folder'


def arena(path: Path, agent: str, half_bytes: int = 16_384) -> None:
    page = struct.pack("=8sQQ", b"VMCARENA", 1, half_bytes).ljust(4096, b"\0")
    descriptor = f"principal, {agent}, main".encode().ljust(8192, b"\0")
    path.write_bytes(page + descriptor + b"\7" * (2 * half_bytes))


def differences(path: Path, before: bytes) -> list[int]:
    after = path.read_bytes()
    assert len(after) == len(before)
    return [
        index for index, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) > 1
    ]


def test_flip_bytes_flips_one_in_each_half_of_that_agent_alone(tmp_path: Path) -> None:
    folder = tmp_path / "cpu"
    folder.mkdir()
    arena(folder / "a", "coder")
    arena(folder / "b", "writer")
    (folder / "c").write_bytes(b"coder" * 9999)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert flip_bytes(tmp_path, "coder") == 2
    assert differences(folder / "a", before["a"]) == [12_288 + 4096, 12_288 + 16_384 + 4096]
    assert differences(folder / "b", before["b"]) == []
    assert differences(folder / "c", before["c"]) == []


def test_kill_is_verified_and_never_hits_everybody() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        assert not wait_dead(victim.pid, 0.05)
        assert kill(victim.pid)
    for pid in (0, 1, -1):
        with pytest.raises(AssertionError):
            kill(pid)


def test_the_budget_tells_who_would_not_fit(capsys: Any, tmp_path: Path) -> None:
    models: Sequence[DemoModel] = [
        DemoModel("small", tmp_path, 92 * MIB, 47 * MIB, 1),
        DemoModel("large", tmp_path, 235 * MIB, 21 * MIB, 1),
    ]
    total = demo._separate(Receipts(Output(json=False)), models, 382 * MIB)
    assert total == (2 * 139 + 256) * MIB
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[-3:-1]] == ["fits", "fits"]
    assert lines[-1].endswith("out of memory, short by 152 MiB")
