#!/usr/bin/env python3
"""Everything that needs a GPU, in one go: the ``gpu`` tests and the benches, with a summary.

    make gpu-suite                                   # in a set-up clone on a CUDA host
    make gpu-suite MODEL=file.gguf                   # and with a real model's layers
    make gpu-suite SUITE="--only pipeline --only layers --minutes 5"
    WHEELS=folder python3 scripts/gpu_suite.py       # on a bare host: wheels are installed aside

The real model is the file that MODEL names, or the largest one in .models; without one that step is
left out.
Writes summary.md, results.json, log.txt and a picture per bench into $OUT (or build/gpu-suite).
A step that fails or takes too long is reported, and the next one runs. Needs Python 3.11 and
nothing else to start with; no git, no network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from gpu_summary import Outcome, summary

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("protocol", "client", "broker", "worker")


@dataclass(frozen=True)
class Bench:
    """A step that is one of ``conductor bench``.

    Attributes:
        share: of the time.
        verb: which bench; empty: the step's name.
        arguments: beside the usual ones.
        small: the same where there is no GPU; None: no other ones.
    """

    share: float
    verb: str = ""
    arguments: tuple[str, ...] = ()
    small: tuple[str, ...] | None = None


REAL = "real"
"""The step with a model that somebody gives."""

BENCHES = {
    "parallel": Bench(40),
    "switch": Bench(130),
    "estimate": Bench(30),
    "leak": Bench(100),
    "pipeline": Bench(70, arguments=("--grid",)),
    "layers": Bench(
        210,
        "pipeline",
        ("--random", "8B", "--batch", "512"),
        small=("--random", "tiny-1", "--batch", "2"),
    ),
    REAL: Bench(60, "pipeline"),
}
STEPS = {"tests": 360.0, **{name: bench.share for name, bench in BENCHES.items()}}
"""Shares of the time, in order."""

MINUTES = 18.0
GRACE_S = 25.0


class Suite:
    """Runs the steps.

    Args:
        out: folder of the results.
        device: ``cuda:N``; ``cpu`` tries the script itself.
        minutes: for everything.
        pictures: draw them; needs matplotlib.
        model: GGUF file of the step with a real one.
    """

    def __init__(
        self,
        out: Path,
        device: str,
        minutes: float,
        *,
        pictures: bool = True,
        model: Path | None = None,
    ) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.model = model
        self.out, self.device, self.pictures = out, device, pictures
        self.grace_s = GRACE_S
        self.until = time.monotonic() + 60 * minutes
        self.scratch = Path(tempfile.mkdtemp(prefix="vmc-suite-"))
        self.log = (out / "log.txt").open("w")
        self.python = self._python()
        self.env = self._environment()
        self.outcomes: list[Outcome] = []
        self.reports: dict[str, Any] = {}

    def _python(self) -> str:
        venv = ROOT / ".venv" / "bin" / "python"
        return str(venv) if venv.exists() and not os.environ.get("WHEELS") else sys.executable

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        own = [str(ROOT / part) for part in PARTS]
        site = [str(self.scratch / "site")] if env.get("WHEELS") else []
        env["PYTHONPATH"] = os.pathsep.join([*site, *own, *filter(None, [env.get("PYTHONPATH")])])
        env["PYTHONUNBUFFERED"] = "1"
        cuda = "/usr/local/cuda/lib64"
        if Path(cuda).is_dir():
            before = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = os.pathsep.join([cuda, *([before] if before else [])])
        return env

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def step(self, name: str, command: list[str], limit_s: float) -> Outcome:
        """One process; it and its children are gone afterwards."""
        print(f"-- {name} (at most {limit_s:.0f} s)", flush=True)
        self.log.write(f"\n===== {name}: {' '.join(command)}\n")
        self.log.flush()
        began, timed_out = time.monotonic(), False
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = _Reader(process.stdout, self.log)
        try:
            process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            timed_out = True
            self._end(process)
        lines = reader.join()
        outcome = Outcome(name, time.monotonic() - began, process.returncode, timed_out, lines)
        self.outcomes.append(outcome)
        print(f"   {outcome.verdict}, {outcome.seconds:.0f} s", flush=True)
        return outcome

    def _end(self, process: subprocess.Popen[str]) -> None:
        # An interrupt first: the stage of a bench takes its children along.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self.grace_s)
                return

    # --- steps --------------------------------------------------------------------------------

    def install(self) -> None:
        """Wheels, aside from whatever is installed; then the preload library."""
        if folder := os.environ.get("WHEELS"):
            wheels = sorted(map(str, Path(folder).glob("*.whl")))
            pip = [self.python, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
            pip += ["--no-compile", "--no-cache-dir", "--target", str(self.scratch / "site")]
            self.step("install", [*pip, *wheels], min(120.0, self.left_s))
        module = "vram_conductor.worker.vmm.build"
        self.step("preload library", [self.python, "-m", module], min(60.0, self.left_s))
        self.step("doctor", [*self._conductor(), "doctor"], min(60.0, self.left_s))

    def _conductor(self) -> list[str]:
        return [self.python, "-m", "vram_conductor.client.cli"]

    def run(self, names: list[str]) -> None:
        """The named steps; what one does not use of its time is the others'."""
        for index, name in enumerate(names):
            shares = sum(STEPS[later] for later in names[index:])
            limit_s = self.left_s * STEPS[name] / shares
            if limit_s < 5:
                self.outcomes.append(Outcome(name, 0.0, 1, timed_out=True))
                continue
            if name == "tests":
                self.tests(limit_s)
            else:
                self.bench(name, limit_s)

    def tests(self, limit_s: float) -> None:
        """The tests that need a GPU."""
        command = [
            self.python,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "tests/gpu",
            "-v",
            "-rs",
            "--durations=12",
            "--tb=short",
        ]
        self.step("tests", [*command, "-p", "no:cacheprovider"], limit_s)

    def bench(self, name: str, limit_s: float) -> None:
        """One bench; it is told to be done a little earlier than it is made to."""
        file = self.scratch / f"{name}.json"
        bench = BENCHES[name]
        command = [*self._conductor(), "bench", bench.verb or name, "--device", self.device]
        on_cpu = self.device == "cpu" and bench.small is not None
        command += (bench.small or ()) if on_cpu else bench.arguments
        if name == REAL:
            command += ["--model", str(self.model)]
        command += ["--json", str(file)]
        if self.pictures:
            command += ["--plot", str(self.out / f"{name}.png")]
        command += ["--seconds", str(int(limit_s * 0.85))]
        self.step(name, command, limit_s)
        if file.exists():
            self.reports[name] = json.loads(file.read_text())

    # --- telling ------------------------------------------------------------------------------

    def finish(self) -> int:
        """Write everything; the exit code."""
        (self.out / "results.json").write_text(json.dumps(self.reports, indent=1) + "\n")
        told = summary(self.outcomes, self.reports)
        (self.out / "summary.md").write_text(told)
        self.log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        print(told)
        return 0 if all(outcome.verdict == "ok" for outcome in self.outcomes) else 1


class _Reader:
    """Copies a child's output into the log while it runs."""

    def __init__(self, source: TextIO | Any, log: TextIO) -> None:
        self._lines: list[str] = []
        self._source, self._log = source, log
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._source:
            self._lines.append(line.rstrip("\n"))
            self._log.write(line)
            self._log.flush()

    def join(self) -> list[str]:
        self._thread.join(GRACE_S)
        return list(self._lines)


def real_model() -> Path | None:
    """See this module's first lines."""
    if named := os.environ.get("MODEL"):
        return Path(named).resolve()
    found = (ROOT / ".models").glob("*.gguf")
    return max(found, key=lambda path: path.stat().st_size, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", action="append", choices=list(STEPS), help="may be repeated")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="default: $OUT, else build/gpu-suite")
    parser.add_argument("--no-pictures", action="store_true", help="where there is no matplotlib")
    args = parser.parse_args()
    model = real_model()
    if model is None and REAL in (args.only or []):
        parser.error(f"--only {REAL}: name a model: MODEL=file.gguf, or put one into .models")
    if model is not None and not model.is_file():
        parser.error(f"MODEL: {model} is no file")
    names = [name for name in STEPS if name != REAL or model is not None]
    out = args.out or Path(os.environ.get("OUT") or ROOT / "build" / "gpu-suite")
    pictures = not args.no_pictures
    suite = Suite(out, args.device, args.minutes, pictures=pictures, model=model)
    suite.install()
    suite.run([name for name in names if args.only is None or name in args.only])
    return suite.finish()


if __name__ == "__main__":
    sys.exit(main())
