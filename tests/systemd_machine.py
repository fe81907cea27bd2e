"""A real systemd as the first process of a machine made of namespaces, to run our units in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

SCRIPT = Path(__file__).with_suffix(".sh")
SYSTEMD = Path("/lib/systemd/systemd")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 120.0


class SystemdMachine:
    """Started in ``with``; what it says is in ``log``.

    Args:
        folder: seen as ``/mnt/given`` there; gets the command ``conductor`` and the log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The units may not look into homes and have a /tmp of their own: wherever interpreter and
        # project lie, they are seen below /mnt.
        self._seen = {
            Path(sys.base_prefix): "/mnt/python",
            Path(sys.prefix): "/mnt/venv",
            ROOT: "/mnt/project",
        }
        parts = [str(ROOT / part) for part in ("client", "broker", "worker", "protocol")]
        packages = [entry for entry in sys.path if entry.endswith("-packages")]
        path = ":".join(self._there(Path(entry)) for entry in [*parts, *packages])
        python = f"/mnt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        (folder / "conductor").write_text(
            f"#!/bin/sh\nexport PYTHONPATH={path} LD_LIBRARY_PATH=/mnt/python/lib\n"
            f'exec {python} -m vram_conductor.client.cli "$@"\n'
        )
        self._group = _cgroups() / f"vram-conductor-test-{os.getpid()}"
        self._log = folder / "systemd.log"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def run(self, line: str) -> tuple[int, str]:
        """Exit code and output of a shell command there, as root."""
        enter = ["nsenter", "-t", str(self._first), "-m", "-p", "-n", "-i", "-u", "-C", "--"]
        environment = ["env", "SYSTEMD_UNIT_PATH=/etc/systemd/system", "HOME=/root"]
        done = subprocess.run(
            [*enter, *environment, "bash", "-c", f"cd /mnt/given && {line}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode, done.stdout.decode(errors="replace")

    def __enter__(self) -> Self:
        self._group.mkdir()
        command = ["unshare", "-m", "-p", "-n", "-i", "-u", "-C", "--fork", "--kill-child"]
        command += ["--mount-proc", str(SCRIPT), str(self.folder), *map(str, self._seen)]
        enter_group = f'echo $$ > "{self._group}/cgroup.procs"; exec "$@"'
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", enter_group, "-", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up_s = time.monotonic() + PATIENCE_S
        while not self._up():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self._end()
                raise OSError(f"systemd does not start here: {self.log[-2_000:]}")
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log[-10_000:] + self.run("cat /run/said")[1][-20_000:])
        self._end()

    @property
    def _first(self) -> int:
        """systemd's process id, as seen from here."""
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _there(self, path: Path) -> str:
        """Where it is seen there; the longest of the folders that hold it counts."""
        holding = [folder for folder in self._seen if path.is_relative_to(folder)]
        if not holding:
            return str(path)
        folder = max(holding, key=lambda each: len(each.parts))
        return f"{self._seen[folder]}/{path.relative_to(folder)}"

    def _up(self) -> bool:
        try:
            code, _ = self.run("systemctl is-system-running --wait")
        except (IndexError, OSError):
            return False
        return code == 0

    def _end(self) -> None:
        """All of it: --kill-child ends systemd, and the kernel what ran below it."""
        self._process.kill()
        self._process.wait(30)
        give_up_s = time.monotonic() + 30
        while self._group.exists() and time.monotonic() < give_up_s:
            for group in sorted(self._group.rglob("*/"), reverse=True):
                _remove(group)
            _remove(self._group)
            time.sleep(0.02)


def why_not() -> str:
    """Why there can be no such machine here; empty: there can, as far as is known."""
    if os.getuid() != 0:
        return "a systemd of its own needs root"
    missing = [tool for tool in ("unshare", "nsenter", "systemctl") if shutil.which(tool) is None]
    if missing or not SYSTEMD.exists():
        return f"no systemd here, or no {', '.join(missing) or SYSTEMD}"
    try:
        _cgroups()
    except LookupError as error:
        return str(error)
    return ""


def _cgroups() -> Path:
    """Where the unified hierarchy is mounted.

    Raises LookupError.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(where)
    raise LookupError("no unified control groups are mounted here")


def _remove(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:  # somebody is still dying in it
        return
