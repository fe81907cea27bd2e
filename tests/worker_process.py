"""Starts real worker processes for tests, and makes sure that they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class WorkerProcess:
    """``python -m vram_conductor.worker`` with private folders; its log is ``log``. ``code``:
    Python source to run instead. ``enter``: what the command begins with, to run it elsewhere."""

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        *flags: str,
        device: str = "cpu",
        code: str = "",
        enter: Sequence[str] = (),
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.arenas = folder / "arenas"
        self._log = (folder / f"worker-{time.monotonic_ns()}.log").open("w+b")
        self.life_r, self.life_w = os.pipe()
        module = ["-c", code] if code else ["-m", "vram_conductor.worker"]
        command = [*enter, sys.executable, *module, "--device", device]
        command += ["--workers", endpoint, "--arena-dir", str(self.arenas)]
        command += ["--supervised-fd", str(self.life_r), *flags]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[self.life_r],
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def kill(self) -> None:
        """kill -9."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def terminate(self, patience_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience_s)

    def files(self) -> list[Path]:
        """The arena files."""
        return sorted(self.arenas.rglob("*.kv"))

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.kill()
        os.close(self.life_r)
        if self.life_w >= 0:
            os.close(self.life_w)
        if kind is not None:
            sys.stderr.write(self.log)
        self._log.close()
