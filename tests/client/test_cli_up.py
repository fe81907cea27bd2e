"""``conductor up`` as a person and a script meet it; a real broker, mostly without workers."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_parts import eventually, running
from terminal import Terminal

from vram_conductor.client import cli
from vram_conductor.client.sync import Conductor
from vram_conductor.client.up_lock import LOCK_NAME, UpLock
from vram_conductor.protocol.config import arena_dir, load_config
from vram_conductor.protocol.errors import AlreadyExists, Unavailable
from vram_conductor.worker.arena_dir import ArenaDir

CONDUCTOR = [sys.executable, "-m", "vram_conductor.client.cli"]
UNMANAGED = (
    '[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "64 MiB"\nhost_cap = "1 MiB"\n'
    "managed = false\n"
)


def configure(folder: Path, broker: str = "", worker: str = "", device: str = UNMANAGED) -> Path:
    path = folder / "c.toml"
    path.write_text(
        f'[broker]\nruntime_dir = "{folder}/r"\nstate_dir = "{folder}/s"\n{broker}\n'
        f'[worker]\narena_dir = "{folder}/a"\n{worker}\n{device}'
    )
    return path


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("VRAM_CONDUCTOR_")]:
        monkeypatch.delenv(name)


def up(config: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CONDUCTOR, "up", "--config", str(config), *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_value(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The JSON value that it prints once it is up."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line == "}\n":
            break
    return dict(json.loads("".join(lines)))


def test_results_on_stdout_logs_on_stderr(short_tmp: Path) -> None:
    with up(configure(short_tmp), "--json") as process:
        value = read_value(process)
        assert value["pid"] == process.pid
        assert value["devices"] == []
        assert value["endpoints"]["clients"] == f"ipc://{short_tmp}/r/clients.ipc"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    for text in ("broker.ready", "stopping: what runs may finish", "broker.stopped", "\nstopped\n"):
        assert text in err


def test_in_a_terminal(short_tmp: Path) -> None:
    config = str(configure(short_tmp))
    with Terminal([*CONDUCTOR, "up", "--config", config]) as terminal:
        terminal.expect("next, in another terminal")
        shown = terminal.text
        assert f"conductor is up, pid {terminal.process.pid}; Ctrl-C stops it" in shown
        assert f"  clients  ipc://{short_tmp}/r/clients.ipc" in shown
        assert "  devices  none here: start them with conductor worker" in shown
        assert "INFO" not in shown, "who looks at a terminal is told by the supervisor"
        status = subprocess.run(
            [*CONDUCTOR, "status", "--config", config], capture_output=True, text=True, timeout=60
        )
        assert status.returncode == 0
        assert "! no worker for " in status.stdout
        terminal.press("\x03")
        assert terminal.wait() == 0
    assert terminal.text.endswith("\nstopped\n")
    assert max(map(len, terminal.text.splitlines())) <= 80


def test_it_says_when_a_worker_is_ready(short_tmp: Path) -> None:
    device = UNMANAGED.replace("managed = false\n", "").replace("64 MiB", "512 MiB")
    config = str(configure(short_tmp, device=device))
    with Terminal([*CONDUCTOR, "up", "--config", config]) as terminal:
        terminal.expect("waiting for the worker of cpu …")
        assert f"the broker is up, pid {terminal.process.pid}; Ctrl-C stops it" in terminal.text
        assert "conductor is up" not in terminal.text
        terminal.expect("next, in another terminal")
        assert "conductor is up: the worker of cpu is ready" in terminal.text
        terminal.press("\x03")
        assert terminal.wait() == 0
    assert terminal.text.endswith("\nstopped\n")


def test_it_does_not_say_so_when_a_worker_gives_up(short_tmp: Path) -> None:
    (short_tmp / "models.toml").write_text("[[model]]\nname = 5\n")
    config = configure(
        short_tmp,
        worker=f'catalogue = "{short_tmp}/models.toml"',
        device=UNMANAGED.replace("managed = false\n", ""),
    )
    with up(config) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 64
    assert "waiting for the worker of cpu" in out
    assert "conductor is up" not in out
    assert "worker cpu gave up" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_stop_it(short_tmp: Path, number: signal.Signals) -> None:
    with up(configure(short_tmp), "--json") as process:
        read_value(process)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_nohup_is_respected(short_tmp: Path) -> None:
    config = str(configure(short_tmp))
    command = ["nohup", *CONDUCTOR, "up", "--json", "--config", config]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        read_value(process)
        process.send_signal(signal.SIGHUP)
        listed = subprocess.run([*CONDUCTOR, "list", "--config", config], timeout=60, check=False)
        assert listed.returncode == 0
        assert process.poll() is None
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_second_one_is_told_about_the_first(short_tmp: Path) -> None:
    config = configure(short_tmp)
    with up(config, "--json") as first:
        read_value(first)
        with up(config, "--json") as second:
            out, err = second.communicate(timeout=60)
        assert second.returncode == 5
        error = json.loads(out)["error"]
        assert error["reason"] == "already_up"
        assert error["details"]["pid"] == first.pid
        assert f"kill {first.pid}" in err
        assert "conductor status" in err
        assert first.poll() is None
        first.terminate()
        first.communicate(timeout=60)
    # The lock went with its owner.
    with up(config, "--json") as third:
        read_value(third)
        third.kill()
        third.communicate()
    with up(config, "--json") as fourth:
        read_value(fourth)
        fourth.terminate()
        fourth.communicate(timeout=60)


def test_the_lock(tmp_path: Path) -> None:
    lock = UpLock(tmp_path / "deep/state")
    assert (tmp_path / "deep/state" / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    with pytest.raises(AlreadyExists) as caught:
        UpLock(tmp_path / "deep/state")
    assert caught.value.details["pid"] == os.getpid()
    lock.release()
    lock.release()
    UpLock(tmp_path / "deep/state").release()
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable) as refused:
        UpLock(tmp_path / "file")
    assert refused.value.reason == "state_dir_unusable"


def test_an_address_that_is_taken(short_tmp: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f'clients = "tcp://127.0.0.1:{server.getsockname()[1]}"'
        with up(configure(short_tmp, taken), "--json") as process:
            out, err = process.communicate(timeout=60)
    assert process.returncode == 69
    assert json.loads(out)["error"]["reason"] == "broker_failed"
    assert "in use" in err
    assert "its message is above" in err


def test_a_worker_that_cannot_be_helped_stops_everything(short_tmp: Path) -> None:
    (short_tmp / "models.toml").write_text("[[model]]\nname = 5\n")
    config = configure(
        short_tmp,
        worker=f'catalogue = "{short_tmp}/models.toml"',
        device=UNMANAGED.replace("managed = false\n", ""),
    )
    with up(config, "--json") as process:
        broker = read_value(process)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 64
    assert out == ""
    assert "worker cpu gave up (exit code 64); its message is above" in err
    assert "models.toml" in err
    assert broker["devices"] == ["cpu"]
    assert not (short_tmp / "r/clients.ipc").exists(), "the broker has left, too"


def test_a_box_without_the_workers_packages(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name)
    )
    config = configure(short_tmp, device=UNMANAGED.replace("managed = false\n", ""))
    assert cli.main(["up", "--config", str(config)]) == 1
    err = capsys.readouterr().err
    assert "llama_cpp not installed" in err
    assert cli.main(["demo"]) == 1
    assert "llama_cpp not installed" in capsys.readouterr().err
    assert "make setup, or pip install '.[broker,worker]'" in err
    assert not (short_tmp / "r").exists()


def test_without_a_configuration_it_describes_this_box(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is started there is another test's business: the worker's packages are hidden."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_tmp))
    monkeypatch.setenv("XDG_STATE_HOME", str(short_tmp))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(short_tmp))
    monkeypatch.delenv("VRAM_CONDUCTOR_CONFIG", raising=False)
    code = (
        "import sys; from vram_conductor.client import cli, cli_run; "
        "cli_run._WORKER_NEEDS = ('no_such_package',); sys.exit(cli.main(['up']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"using {short_tmp}/vram-conductor/default.toml" in done.stderr
    assert "no_such_package not installed" in done.stderr


def test_a_device_that_nobody_configured(short_tmp: Path, capsys: Any) -> None:
    assert cli.main(["up", "--config", str(configure(short_tmp, device=""))]) == 8
    assert "names no device; add a [[device]] section" in capsys.readouterr().err


def test_a_second_one_beside_the_first(short_tmp: Path) -> None:
    """Folders of its own are enough: its parked states have another place, too."""
    device = UNMANAGED.replace("managed = false\n", "").replace("64 MiB", "512 MiB")
    for name in ("one", "two"):
        (short_tmp / name).mkdir()
        path = configure(short_tmp / name, device=device)
        path.write_text(path.read_text().replace(f'arena_dir = "{short_tmp}/{name}/a"', ""))
    arenas = [arena_dir(load_config(short_tmp / name / "c.toml")) for name in ("one", "two")]
    try:
        with (
            up(short_tmp / "one/c.toml", "--json") as first,
            up(short_tmp / "two/c.toml") as second,
        ):
            for name in ("one", "two"):
                with Conductor(f"ipc://{short_tmp}/{name}/r/clients.ipc") as conductor:
                    eventually(
                        lambda c=conductor: c.status().devices[0].worker is not None,  # type: ignore[misc]
                        "its worker is ready",
                    )
            for process in (first, second):
                process.terminate()
                process.communicate(timeout=60)
        assert (first.returncode, second.returncode) == (0, 0)
    finally:
        for folder in arenas:
            shutil.rmtree(folder, ignore_errors=True)


def test_a_second_one_on_the_first_ones_arenas_gives_up(short_tmp: Path) -> None:
    device = UNMANAGED.replace("managed = false\n", "").replace("64 MiB", "512 MiB")
    arena = ArenaDir(short_tmp / "a", "cpu")
    try:
        with up(configure(short_tmp, device=device), "--json") as process:
            _, err = process.communicate(timeout=60)
    finally:
        arena.close()
    assert process.returncode == 69
    assert "arena_in_use" in err
    assert f"pid {os.getpid()}" in err
    assert "broker.runtime_dir" in err
    assert "starting it again" not in err


def test_the_children_of_one_that_is_killed_leave(short_tmp: Path) -> None:
    with up(configure(short_tmp), "--json") as process:
        read_value(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        process.kill()
        process.communicate()
    eventually(lambda: not any(running(int(pid)) for pid in children), "they are gone")
