"""How a bench ends before its time: killed, without memory, with nobody who reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from scene import until

from vram_conductor.client import bench_setting
from vram_conductor.client.bench_setting import ask_worker
from vram_conductor.protocol.errors import Internal, ResourceExhausted

CONDUCTOR = [sys.executable, "-m", "vram_conductor.client.cli"]
SMALL = ["--n-layers", "2", "--bytes-per-layer", "64KiB", "--compute-iters", "1", "--repeats", "1"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_half_a_model_is_not_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    """Only the client is told: its child must be told by it."""
    pytest.importorskip("gguf", reason="gguf is not installed")
    bench = subprocess.Popen(
        [*CONDUCTOR, "bench", "pipeline", "--random", "1.2B"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        until(lambda: list(tmp_path.glob("*/*.part*")), "the model is begun")
        bench.send_signal(number)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert bench.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert "Traceback" not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_stdout_costs_only_itself(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    file = tmp_path / "found.json"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CONDUCTOR, "bench", "pipeline", *SMALL, "--json", str(file)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert len(json.loads(file.read_text())["data"]["rows"]) == 1


@pytest.mark.parametrize(("layers", "mib"), [(40, 32), (1, 240)])
def test_a_process_without_memory_says_so_with_numbers(
    layers: int, mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = bench_setting.worker_command
    narrow = ["sh", "-c", f'ulimit -v {1 << 20}; exec "$@"', "sh"]
    monkeypatch.setattr(
        bench_setting, "worker_command", lambda *arguments: [*narrow, *command(*arguments)]
    )
    # The file alone is mapped; or the slots are too large.
    shape = ["--n-layers", str(layers), "--bytes-per-layer", str(mib << 20), "--slots", "4"]
    with pytest.raises(ResourceExhausted) as raised:
        ask_worker("pipeline", *shape)
    assert raised.value.reason == "host_memory_short"
    assert raised.value.details["available_bytes"] > 0
    assert "ulimit -v" in str(raised.value)


@pytest.mark.parametrize("said", ['{"error": {"code": 1, "reason": "x"}}', '{"error": 3}', "[", ""])
def test_an_answer_that_is_none(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import sys; print({said!r}); sys.stderr.write('so it was\\n')"
    monkeypatch.setattr(
        bench_setting, "worker_command", lambda *arguments: [sys.executable, "-c", program]
    )
    with pytest.raises(Internal, match="bench rates failed: so it was") as raised:
        ask_worker("rates")
    assert raised.value.reason == "bench_failed"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "ended by SIGKILL (the system does that when memory",
        ),
        ("import os; os.kill(os.getpid(), 7)", "ended by SIGBUS, no output"),
        ("import os; os.kill(os.getpid(), 40)", "ended by signal 40, no output"),
        ("raise SystemExit(3)", "exit code 3, no output"),
    ],
)
def test_how_a_silent_child_ended_is_said(
    program: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench_setting, "worker_command", lambda *arguments: [sys.executable, "-c", program]
    )
    with pytest.raises(Internal) as raised:
        ask_worker("rates")
    assert text in str(raised.value)


def test_a_child_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that does not want to."""
    program = "import signal; signal.signal(15, signal.SIG_IGN); print('x'); signal.pause()"
    monkeypatch.setattr(
        bench_setting, "worker_command", lambda *arguments: [sys.executable, "-c", program]
    )
    monkeypatch.setattr(bench_setting, "_END_S", 0.1)
    with pytest.raises(Internal, match=r"gave no answer within 0 s: .*--seconds"):
        ask_worker("rates", timeout_s=0.3)
