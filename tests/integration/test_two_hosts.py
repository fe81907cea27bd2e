"""docs/two-hosts.md, followed literally, with a real model: over loopback, and between hosts in
network namespaces."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from network import Network, why_not

from vram_conductor.broker.shell import options as broker_options
from vram_conductor.protocol.config import load_config
from vram_conductor.worker import options as worker_options

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-hosts.md").read_text("utf-8")
PATIENCE_S = 120.0
NAMES = ("broker", "gpu", "laptop")


def commands() -> Iterator[tuple[str, str]]:
    """Every command of the page, with the host that it says it is for."""
    host, inside = "broker", False
    for line in PAGE.splitlines():
        if where := re.match(r"On `(\w+)\.example`", line):
            host = where[1]
        if line.startswith("```"):
            inside = line == "```sh"
        elif inside:
            yield host, line


class Machine:
    """A host: a home, and the clone's ``configs`` with the broker's address."""

    def __init__(
        self, folder: Path, enter: tuple[str, ...], address: str, ports: list[int]
    ) -> None:
        self.home = folder
        self.clone = folder / "clone"
        self.enter = enter
        (self.clone / "configs").mkdir(parents=True)
        for path in (ROOT / "configs").glob("*.toml"):
            text = path.read_text().replace("broker.example", address)
            text = text.replace(":7800", f":{ports[0]}").replace(":7801", f":{ports[1]}")
            (self.clone / "configs" / path.name).write_text(text)
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        command = f'#!/bin/sh\nexec {sys.executable} -m vram_conductor.client.cli "$@"\n'
        (bin_folder / "conductor").write_text(command)
        (bin_folder / "conductor").chmod(0o755)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("VRAM_", "XDG_"))},
            "HOME": str(folder),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(folder),
            "VRAM_CONDUCTOR_WORKER_ARENA_DIR": str(folder / "arena"),
        }

    def run(self, line: str) -> tuple[int, str]:
        """Exit code and output of a command that ends."""
        done = subprocess.run(
            [*self.enter, "bash", "-c", line],
            cwd=self.clone,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout.decode()


class Hosts:
    """The page's three hosts, each in a namespace of its own; without a network one plays all."""

    def __init__(
        self, folder: Path, models: Path, stack: ExitStack, network: Network | None
    ) -> None:
        self.stack = stack
        self.started = 0
        self.of: dict[str, Machine] = {}
        if network is None:
            one = Machine(folder, (), "127.0.0.1", free_ports(2))
            self.of = dict.fromkeys(NAMES, one)
        else:
            hosts = {name: network.host(name) for name in NAMES}
            for name, host in hosts.items():
                (folder / name).mkdir()
                where = hosts["broker"].address
                self.of[name] = Machine(folder / name, host.enter, where, [7800, 7801])
        for machine in self.of.values():
            machine.env["VRAM_CONDUCTOR_WORKER_MODELS_DIR"] = str(models)

    def start(self, machine: Machine, line: str, until: str) -> None:
        """A command that goes on; its log has ``until`` by the time this returns."""
        self.started += 1
        log = machine.home / f"{self.started}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*machine.enter, *shlex.split(line)],
                cwd=machine.clone,
                env=machine.env,
                stdout=out,
                stderr=out,
            )
        self.stack.callback(process.wait, 30)
        self.stack.callback(process.terminate)
        give_up_s = time.monotonic() + PATIENCE_S
        while until not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.02)

    def follow(self, host: str, line: str) -> tuple[int, str]:
        """One command of the page, on the host that it is for."""
        machine = self.of[host]
        if line.startswith("conductor broker"):
            self.start(machine, line, "broker.ready")
            return 0, ""
        if line.startswith("conductor worker"):
            self.start(machine, line, "session with the broker")
            return 0, ""
        if there := re.match(r"ssh (\w+)\.example (.*)$", line):
            return self.of[there[1]].run(f"cd && {there[2]}")
        if there := re.match(r"scp (\S+) (\w+)\.example:(\S+)$", line):
            return machine.run(f"cp {there[1]} {self.of[there[2]].home}/{there[3]}")
        return machine.run(line)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(params=["loopback", "namespaces"])
def hosts(request: pytest.FixtureRequest, short_tmp: Path, smollm2: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        network = None
        if request.param == "namespaces":
            if reason := why_not():
                pytest.skip(reason)
            network = stack.enter_context(Network(delay_ms=2))
        yield Hosts(short_tmp, smollm2.parent, stack, network)


def test_the_page_as_it_is_written(hosts: Hosts) -> None:
    said: dict[str, str] = {}
    for host, line in commands():
        code, said[line] = hosts.follow(host, line)
        assert code == 0, f"{line}\n{said[line]}"
    (listed,) = (text for line, text in said.items() if line.startswith("conductor keys list"))
    assert re.search(r"gpu1 +gpu1 +worker", listed)
    assert re.search(r"alice +alice +owner +agents 8, queued 32, vram 6.00 GiB", listed)
    assert re.search(r"dashboard +alice +observer", listed)
    (status,) = (text for line, text in said.items() if line.startswith("conductor status"))
    assert "cpu" in status
    (answer,) = (text for line, text in said.items() if line.startswith("conductor decode"))
    assert answer.strip()
    # The last command took the key back.
    config = "--config configs/client.toml"
    laptop, broker = hosts.of["laptop"], hosts.of["broker"]
    give_up_s = time.monotonic() + 5
    while "key_refused" not in (told := laptop.run(f"conductor status {config}"))[1]:
        assert time.monotonic() < give_up_s, told
    assert told[0] == 9
    # What the page says of an observer, and of agents that stay. Its key is still there.
    eye = f"--key dashboard.key {config}"
    code, text = broker.run(f"conductor list {eye}")
    assert code == 0
    assert "coder" in text
    code, text = broker.run(f"conductor unregister coder {eye}")
    assert code == 9
    assert "role_denied" in text


def test_every_reason_in_the_table_is_one() -> None:
    spec = (ROOT / "protocol" / "SPEC.md").read_text("utf-8")
    table = PAGE[PAGE.index("| you see") :]
    reasons = [word for row in table.splitlines() for word in re.findall(r"^\| `(\w+)`", row)]
    assert len(reasons) > 5
    for reason in reasons:
        assert f"\n| `{reason}` |" in spec


@pytest.mark.parametrize("unit", ["vram-conductor-broker", "vram-conductor-worker@"])
def test_a_unit_starts_what_there_is(unit: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / f"{unit}.service").read_text()
    start = re.search(r"^ExecStart=\S+/conductor (broker|worker) (.*)$", text, re.MULTILINE)
    assert start is not None
    part, flags = start[1], start[2].replace("%i", "cpu")
    config = ROOT / "configs" / f"{part}.toml"
    assert f"/etc/vram-conductor/{part}.toml" in flags
    argv = shlex.split(flags.replace(f"/etc/vram-conductor/{part}.toml", str(config)))
    env = dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.MULTILINE))
    options = {"broker": broker_options, "worker": worker_options}[part]
    parsed = options.parse(argv, env).config
    if part == "broker":
        assert parsed.broker.state_dir == "/var/lib/vram-conductor"
        assert parsed.broker.clients == load_config(config).broker.clients
    else:
        assert parsed.worker.key == "/etc/vram-conductor/worker.key"
