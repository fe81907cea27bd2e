"""Create ``.venv`` with everything the project needs. Standard library only; safe to repeat.

    python3 scripts/setup.py            # venv, dependencies, llama.cpp
    python3 scripts/setup.py --models   # and the models of the demo and the tests

A stamp makes a second run a matter of milliseconds: nothing is resolved or downloaded unless
``pyproject.toml`` or the pinned versions changed. llama-cpp-python is compiled from source (about
five minutes on two cores); CMAKE_ARGS is passed on, so CUDA is ``CMAKE_ARGS=-DGGML_CUDA=on``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
LLAMA = "llama-cpp-python==0.3.36"
NEEDED_BYTES = 3_000_000_000
CMAKE_DEFAULT = "-DLLAVA_BUILD=OFF"  # the multimodal part: 40 % of the compile time, unused here


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"setup: {text}")


def check_host() -> None:
    """Fail early, with what to do, instead of in the middle of a compiler log."""
    if sys.version_info < (3, 11):
        fail(
            f"Python >= 3.11 is needed, this is {sys.version.split()[0]}; "
            "run it with another one: make PYTHON=python3.12 setup"
        )
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        fail(f"needs about 3 GB of disk here, {free / 1e9:.1f} GB are free")


def check_compiler() -> None:
    cc = os.environ.get("CC", "cc")
    cxx = os.environ.get("CXX", "c++")
    missing = [tool for tool in (cc, cxx) if shutil.which(tool) is None]
    if missing:
        fail(
            f"no compiler ({', '.join(missing)}): llama-cpp-python is built from source. "
            "Debian, Ubuntu: apt-get install build-essential; Fedora: dnf install gcc-c++ make"
        )


def fingerprint() -> str:
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(os.environ.get("CMAKE_ARGS", "").encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()[:16]


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*args: str) -> None:
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check", "-q"]
    if subprocess.run([*command, "-c", str(CONSTRAINTS), *args], cwd=ROOT).returncode:
        fail("pip failed (see above); check the network or your package index, then run it again")


def progress(done: int, total: int, start: float) -> str:
    width = 24
    filled = width * done // max(total, 1)
    bar = "#" * filled + "." * (width - filled)
    return f"llama.cpp [{bar}] {done}/{total} files, {time.monotonic() - start:.0f} s"


def install_llama() -> None:
    """Build llama-cpp-python, turning the compiler's log into a progress line."""
    probe = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    have = subprocess.run([python(), "-c", probe], capture_output=True, text=True)
    if have.stdout.strip() == LLAMA.split("==")[1]:
        return
    check_compiler()
    env = dict(os.environ)
    env["CMAKE_ARGS"] = f"{CMAKE_DEFAULT} {env.get('CMAKE_ARGS', '')}".strip()
    say(f"building {LLAMA} with CMAKE_ARGS={env['CMAKE_ARGS']!r}; five minutes on two cores")
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check", "-v"]
    start, last, tail = time.monotonic(), 0.0, []
    with subprocess.Popen(
        [*command, "-c", str(CONSTRAINTS), LLAMA],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail = [*tail[-40:], line]
            step = re.match(r"\s*\[(\d+)/(\d+)\]", line)
            # A terminal gets a living line, a log one line every fifteen seconds.
            period = 0.2 if sys.stdout.isatty() else 15.0
            if step and time.monotonic() - last > period:
                last = time.monotonic()
                text = progress(int(step[1]), int(step[2]), start)
                print(f"\r{text}" if sys.stdout.isatty() else text, end="", flush=True)
                if not sys.stdout.isatty():
                    print(flush=True)
    if process.returncode:
        sys.stdout.write("".join(tail))
        fail("building llama-cpp-python failed; the end of its log is above")
    if sys.stdout.isatty():
        print()
    say(f"llama.cpp is ready ({time.monotonic() - start:.0f} s)")


def setup() -> None:
    stamp = VENV / "setup-stamp"
    mark = fingerprint()
    if stamp.exists() and stamp.read_text() == mark:
        return
    check_host()
    if not (VENV / "bin" / "python").exists():
        say(f"creating {VENV.relative_to(ROOT)}")
        venv.create(VENV, with_pip=True, clear=VENV.exists())
    install_llama()
    say("installing the other dependencies")
    pip("-e", ".[broker,worker,dev]")
    stamp.write_text(mark)
    say("done")


def models(gemma: bool) -> None:
    """The models that the tests use; verified by digest, cached by stamp."""
    command = [python(), "-m", "vram_conductor.client.cli", "models", "pull"]
    names = ["smollm2-135m"]
    if gemma:
        say("gemma3-270m is test input, under the Gemma Terms of Use; GEMMA=0 goes without it")
        names = [*names, "gemma3-270m", "--accept-licence"]
    if subprocess.run([*command, *names], cwd=ROOT, stdout=subprocess.DEVNULL).returncode:
        fail("could not fetch the models (see above)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", action="store_true", help="also fetch the models")
    parser.add_argument("--no-gemma", action="store_true", help="without Gemma 3 270M")
    args = parser.parse_args()
    setup()
    if args.models:
        models(gemma=not args.no_gemma)


if __name__ == "__main__":
    main()
