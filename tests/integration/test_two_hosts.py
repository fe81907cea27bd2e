"""docs/two-hosts.md, followed literally: its commands, over loopback, with a real model."""

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

from vram_conductor.broker.shell import options as broker_options
from vram_conductor.protocol.config import load_config
from vram_conductor.worker import options as worker_options

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "two-hosts.md").read_text("utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]
PATIENCE_S = 120.0


class Hosts:
    """One host that plays all three: a home, and the clone's ``configs`` with its address."""

    def __init__(self, folder: Path, models: Path, stack: ExitStack) -> None:
        self.home = folder
        self.clone = folder / "clone"
        self.stack = stack
        self.started: list[tuple[subprocess.Popen[bytes], Path]] = []
        (self.clone / "configs").mkdir(parents=True)
        ports = free_ports(2)
        for path in (ROOT / "configs").glob("*.toml"):
            text = path.read_text().replace("broker.example", "127.0.0.1")
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
            "VRAM_CONDUCTOR_WORKER_MODELS_DIR": str(models),
            "VRAM_CONDUCTOR_WORKER_ARENA_DIR": str(folder / "arena"),
        }

    def run(self, line: str) -> tuple[int, str]:
        """Exit code and output of a command that ends."""
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.clone,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout.decode()

    def start(self, line: str, until: str) -> None:
        """A command that goes on; its log has ``until`` by the time this returns."""
        log = self.home / f"{len(self.started)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                shlex.split(line), cwd=self.clone, env=self.env, stdout=out, stderr=out
            )
        self.started.append((process, log))
        self.stack.callback(process.wait, 30)
        self.stack.callback(process.terminate)
        give_up_s = time.monotonic() + PATIENCE_S
        while until not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_s, log.read_text()
            time.sleep(0.02)

    def follow(self, line: str) -> tuple[int, str]:
        """One command of the page, on the host that it is for."""
        if line.startswith("conductor broker"):
            self.start(line, "broker.ready")
            return 0, ""
        if line.startswith("conductor worker"):
            self.start(line, "session with the broker")
            return 0, ""
        line = re.sub(r"^ssh \S+ (.*)$", r"cd && \1", line)
        return self.run(re.sub(r"^scp (\S+) \S+:(\S+)$", r"cp \1 ~/\2", line))


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def hosts(short_tmp: Path, smollm2: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(short_tmp, smollm2.parent, stack)


def test_the_page_as_it_is_written(hosts: Hosts) -> None:
    said: dict[str, str] = {}
    for line in COMMANDS:
        code, said[line] = hosts.follow(line)
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
    give_up_s = time.monotonic() + 5
    while "key_refused" not in (told := hosts.run(f"conductor status {config}"))[1]:
        assert time.monotonic() < give_up_s, told
    assert told[0] == 9
    # What the page says of an observer, and of agents that stay.
    eye = f"--key dashboard.key {config}"
    code, text = hosts.run(f"conductor list {eye}")
    assert code == 0
    assert "coder" in text
    code, text = hosts.run(f"conductor unregister coder {eye}")
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
