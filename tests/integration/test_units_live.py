"""The units of deploy/ under a real systemd, installed with the commands of docs/two-hosts.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from systemd_machine import SystemdMachine, why_not

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-hosts.md").read_text("utf-8")
BROKER, WORKER = "vram-conductor-broker", "vram-conductor-worker@cpu"
CONDUCTOR = "/opt/vram-conductor/bin/conductor"
AS_USER = f"runuser -u vram-conductor -- {CONDUCTOR}"
USE = f"{AS_USER} {{}} --clients tcp://127.0.0.1:7800 --key /var/lib/vram-conductor/alice.key"
WAIT_S = 60.0

pytestmark = pytest.mark.real


def steps() -> Iterator[str]:
    """The commands below "As services", for the broker and for a worker: what stands behind the
    remark "or" takes the last argument's place. The program is there already."""
    block = PAGE[PAGE.index("## As services") :].split("```text\n")[1].split("```")[0]
    for line in block.splitlines():
        if "pip install" in line:
            continue
        command, _, other = line.partition("# or ")
        yield command.strip()
        if other:
            head, _, last = command.strip().rpartition(" ")
            yield f"{head} {other.strip().replace('cuda:0', 'cpu')}"
            assert last


class Units:
    def __init__(self, machine: SystemdMachine) -> None:
        self.machine = machine

    def do(self, line: str) -> str:
        code, text = self.machine.run(line)
        assert code == 0, f"{line}\n{text}"
        return text

    def show(self, unit: str, what: str) -> str:
        return self.do(f"systemctl show -P {what} {unit}").strip()

    def until(self, look: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + WAIT_S
        while not look():
            assert time.monotonic() < give_up_s, what
            time.sleep(0.1)

    def ask(self, what: str) -> str:
        return self.do(USE.format(what))

    def served(self) -> bool:
        return "worker pid" in self.machine.run(USE.format("status"))[1]


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Units]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("machine")
    for name in ("configs", "deploy"):
        shutil.copytree(ROOT / name, folder / name)
    for path in (folder / "configs").glob("*.toml"):
        path.write_text(path.read_text().replace("broker.example", "127.0.0.1"))
    config = folder / "configs" / "broker.toml"
    config.write_text(config.read_text().replace("# state_dir", "state_dir"))
    models = folder / "models"
    models.mkdir()
    for path in smollm2.parent.glob(f"{smollm2.name}*"):
        shutil.copy(path, models)
    with ExitStack() as stack:
        try:
            machine = stack.enter_context(SystemdMachine(folder))
        except OSError as error:
            pytest.skip(str(error))
        yield installed(Units(machine))


def installed(units: Units) -> Units:
    """Everything that the page says, in its order; keys before the first start."""
    for step in steps():
        if step.startswith("systemctl"):
            continue
        units.do(step)
    config = "--config /etc/vram-conductor/broker.toml --out /var/lib/vram-conductor"
    units.do(f"{AS_USER} keys new gpu --role worker {config}/worker.key")
    units.do(f"{AS_USER} keys new alice --role admin {config}/alice.key")
    units.do("mv /var/lib/vram-conductor/worker.key /etc/vram-conductor/worker.key")
    units.do("install -d -o vram-conductor /var/cache/vram-conductor")
    units.do("install -o vram-conductor -m 644 -t /var/cache/vram-conductor models/*")
    for step in steps():
        if step.startswith("systemctl"):
            units.do(step)
    units.until(units.served, "the broker has a worker")
    units.ask("register coder --model smollm2-135m --n-ctx 512")
    return units


def test_they_serve(units: Units) -> None:
    assert units.ask('decode coder "One two three" --max-tokens 4').strip()
    for unit in (BROKER, WORKER):
        assert units.show(unit, "ActiveState") == "active"
        assert units.show(unit, "User") == "vram-conductor"
    # What the units shut in: nothing of the file system but its own folders can be written.
    pid = units.show(BROKER, "MainPID")
    inside = f"nsenter -t {pid} -m -S $(id -u vram-conductor) -G 0 --"
    code, text = units.machine.run(f"{inside} touch /etc/vram-conductor/x")
    assert code != 0
    assert "Read-only file system" in text


@pytest.mark.parametrize("unit", [WORKER, BROKER])
def test_one_that_is_killed_is_started_again(units: Units, unit: str) -> None:
    pid = units.show(unit, "MainPID")
    units.do(f"systemctl kill --kill-whom=main -s KILL {unit}")
    units.until(lambda: units.show(unit, "MainPID") not in (pid, "0"), "there is another process")
    units.until(units.served, "the broker has a worker")
    assert units.ask('decode coder "Four five" --max-tokens 4').strip()


def test_a_restart_of_the_broker_brings_its_worker_back(units: Units) -> None:
    """It drains: the worker parks and leaves, with 0, and is started again."""
    restarts = int(units.show(WORKER, "NRestarts"))
    units.do(f"systemctl restart {BROKER}")
    assert units.show(BROKER, "Result") == "success"
    units.until(lambda: int(units.show(WORKER, "NRestarts")) > restarts, "the worker came again")
    units.until(units.served, "the broker has a worker")
    assert units.ask('decode coder "Six seven" --max-tokens 4').strip()


def test_a_worker_whose_key_is_refused_is_not_started_again(units: Units) -> None:
    units.do(f"systemctl stop {WORKER}")
    assert units.show(WORKER, "Result") == "success"
    units.do(f"{AS_USER} keys revoke gpu --config /etc/vram-conductor/broker.toml")
    units.do(f"systemctl start {WORKER}")
    units.until(lambda: units.show(WORKER, "ActiveState") == "failed", "it gives up")
    assert units.show(WORKER, "ExecMainStatus") == "69"


def test_they_stop_in_order(units: Units) -> None:
    """Last: nothing runs afterwards."""
    units.do(f"systemctl stop {BROKER}")
    assert units.show(BROKER, "Result") == "success"
    assert units.show(BROKER, "ExecMainStatus") == "0"


@pytest.mark.parametrize("unit", ["vram-conductor-broker", "vram-conductor-worker@"])
def test_systemd_finds_nothing_wrong(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here")
    # Without the program itself, which it looks for.
    text = (ROOT / "deploy" / f"{unit}.service").read_text()
    name = f"{unit}x.service" if unit.endswith("@") else f"{unit}.service"
    file = tmp_path / name
    file.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    said = [line for line in done.stdout.splitlines() if file.name in line]
    assert (done.returncode, said) == (0, []), done.stdout
