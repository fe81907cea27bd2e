"""``conductor up`` as a process of its own, with private folders, for tests of whole lives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

WAIT_S = 60.0
COMMAND = [sys.executable, "-m", "vram_conductor.client.cli", "up", "--json", "--config"]

DEVICE = '[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "256 MiB"\nhost_cap = "128 MiB"\n'


class Up:
    """``conductor up --json`` below ``folder``; a second one with the same folder is a restart.

    Args:
        folder: short, because of the sockets in it.
        broker, worker: more lines for the sections of these names.
        text: the whole configuration, instead.

    Attributes:
        said: its JSON value, None if it gave up before it was up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        broker: str = "",
        worker: str = "",
        device: str = DEVICE,
        text: str | None = None,
    ) -> None:
        self.folder = folder
        self.arenas = folder / "arenas"
        config = folder / "conductor.toml"
        config.write_text(
            f'[broker]\nruntime_dir = "{folder}/run"\nstate_dir = "{folder}/state"\n{broker}\n'
            f'[worker]\narena_dir = "{self.arenas}"\n{worker}\n{device}'
            if text is None
            else text
        )
        self._log = (folder / f"up-{time.monotonic_ns()}.log").open("w+b")
        self.process = subprocess.Popen(
            [*COMMAND, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=self._environment(),
        )
        self.said: dict[str, Any] | None = self._read()

    def _environment(self) -> dict[str, str]:
        env = {key: value for key, value in os.environ.items() if "VRAM_CONDUCTOR" not in key}
        # A configuration that names no folder of its own must not meet whoever uses the default.
        return env | {"XDG_RUNTIME_DIR": str(self.folder)}

    def _read(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        lines: list[str] = []
        for line in self.process.stdout:
            lines.append(line.decode())
            if line == b"}\n":
                value = json.loads("".join(lines))
                return value if "endpoints" in value else None
        return None

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        assert self.said is not None, self.log
        return str(self.said["endpoints"]["clients"])

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def children(self) -> list[psutil.Process]:
        """Broker, workers and what they started."""
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    def parked(self) -> list[Path]:
        """The files of parked states."""
        return sorted(self.arenas.rglob("*.kv"))

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """kill -9 of the supervisor alone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def __enter__(self) -> Up:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log)
        if self.process.poll() is None:
            self.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
