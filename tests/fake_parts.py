"""Stand-ins for broker and worker processes: scripts that do what a test says.

``FakeParts.executable`` takes the place of the Python interpreter in the supervisor's commands.
"""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 30.0

_SCRIPT = """\
#!{python} -SE
import json, os, select, signal, sys, time
folder = {folder!r}
module, flags = sys.argv[2], sys.argv[3:]
part = module.rpartition(".")[2]
life = int(flags[flags.index("--supervised-fd") + 1])
name = part if part == "broker" else flags[flags.index("--device") + 1]

def note(event, **more):
    line = json.dumps(dict(more, name=name, event=event, pid=os.getpid(), flags=flags))
    fd = os.open(folder + "/events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (line + "\\n").encode())
    os.close(fd)

def count():
    try:
        with open(folder + "/events") as file:
            lines = [json.loads(line) for line in file if line.endswith("\\n")]
        return sum((line["name"], line["event"]) == (name, "start") for line in lines)
    except FileNotFoundError:
        return 0

ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append("TERM"))
wake_r, wake_w = os.pipe()
os.set_blocking(wake_w, False)
signal.set_wakeup_fd(wake_w)

def announce():
    if "--print-endpoints" in flags:
        print(json.dumps(dict(clients="ipc:///c", workers="ipc:///w")), flush=True)

def serve(why=None):
    while not ended:
        ready, _, _ = select.select([life, wake_r], [], [])
        if life in ready:
            ended.append("EOF")
    note("end", why=ended[0])

def ignore():
    note("stubborn")
    while True:
        ended.clear()
        time.sleep(60)

note("start", env=dict(os.environ))
run = count()
{body}
"""


class FakeParts:
    """Broker and workers whose behaviour is Python code.

    In it: ``announce()`` the endpoints, ``serve()`` until SIGTERM or the supervisor's end,
    ``ignore()`` every SIGTERM, ``note(event)``, ``run`` (1 for the first start, 2 …), ``name``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.executable = folder / "python"
        self.broker = "announce(); serve()"
        self.worker = "serve()"

    def write(self) -> str:
        """Make the script; returns its path."""
        body = "\n".join(
            [
                "if part == 'broker':",
                *(f"    {line}" for line in self.broker.splitlines()),
                "else:",
                *(f"    {line}" for line in self.worker.splitlines()),
            ]
        )
        text = _SCRIPT.format(python=sys.executable, folder=str(self.folder), body=body)
        self.executable.write_text(text)
        self.executable.chmod(self.executable.stat().st_mode | stat.S_IXUSR)
        return str(self.executable)

    def events(self, event: str | None = None, name: str | None = None) -> list[dict[str, Any]]:
        """What was noted, in order."""
        path = self.folder / "events"
        if not path.exists():
            return []
        # A line that is being written just now is not there yet.
        lines = path.read_text().rpartition("\n")[0].splitlines()
        found = [json.loads(line) for line in lines]
        return [
            item
            for item in found
            if event in (None, item["event"]) and name in (None, item["name"])
        ]

    def wait_for(self, event: str, name: str, count: int = 1) -> dict[str, Any]:
        """The ``count``-th such event."""
        eventually(lambda: len(self.events(event, name)) >= count, f"{name} {event} x {count}")
        return self.events(event, name)[count - 1]


def eventually(check: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Poll until ``check()``; fail after ``patience_s``."""
    until = time.monotonic() + patience_s
    while not check():
        assert time.monotonic() < until, f"not within {patience_s} s: {what}"
        time.sleep(0.005)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return state(pid) not in ("", "Z")


def state(pid: int) -> str:
    """``R``, ``S``, ``Z`` …, empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
