"""Create ``.venv`` with everything the project needs. Standard library only; safe to repeat.

    python3 scripts/setup.py            # venv, dependencies, llama.cpp
    python3 scripts/setup.py --models   # and the models of the demo and the tests

A stamp makes a second run a matter of milliseconds: nothing is resolved or downloaded unless
``pyproject.toml`` or the pinned versions changed. llama-cpp-python is compiled from source (about
five minutes on two cores); CMAKE_ARGS is passed on, so CUDA is ``CMAKE_ARGS=-DGGML_CUDA=on``. What
was built so stays so until CMAKE_ARGS says otherwise: empty is the CPU, unset keeps what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections import deque
from pathlib import Path

from build_log import Doing, Step, bar, read

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
LLAMA = "llama-cpp-python==0.3.36"
TAIL_LINES = 40
LOG_PERIOD_S = 15.0
PRELOAD = ROOT / "worker" / "vram_conductor" / "worker" / "vmm"
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
    """A build that fails after a minute is a poor way to say that there is no compiler."""
    advice = (
        "llama-cpp-python is built from source. Debian, Ubuntu: apt-get install build-essential; "
        "Fedora: dnf install gcc-c++ make"
    )
    cc, cxx = os.environ.get("CC", "cc"), os.environ.get("CXX", "c++")
    missing = [tool for tool in (cc, cxx) if shutil.which(tool.split()[0]) is None]
    if missing:
        fail(f"no compiler ({', '.join(missing)}): {advice}")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <vector>\nint main() { return std::vector<int>().size(); }\n")
        result = subprocess.run(
            [*cxx.split(), str(source), "-o", str(source.with_suffix(""))],
            capture_output=True,
            text=True,
        )
    if result.returncode:
        sys.stdout.write(result.stderr)
        fail(f"{cxx} cannot compile a small program (its message is above): {advice}")


def llama_stamp() -> Path:
    """What the library in the venv was built from, and how."""
    return VENV / "llama-stamp"


def wished() -> str:
    """The builder's CMAKE_ARGS; where they are not given, those of the build that is there: a
    build for a GPU is not replaced by one for the CPU because a variable was forgotten."""
    given = os.environ.get("CMAKE_ARGS")
    if given is not None:
        return given.strip()
    stamp = llama_stamp()
    built = stamp.read_text() if stamp.exists() else ""
    return built.partition(CMAKE_DEFAULT)[2].strip()


def fingerprint() -> str:
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    digest.update(wished().encode())
    digest.update(str(ROOT).encode())
    return digest.hexdigest()[:16]


def python() -> str:
    return str(VENV / "bin" / "python")


class Screen:
    """One living line on a terminal; in a log a line now and then."""

    def __init__(self) -> None:
        self.tty = sys.stdout.isatty()
        self._start = time.monotonic()
        self._last = -LOG_PERIOD_S
        self._drawn = False

    def show(self, news: Step | Doing) -> None:
        now = time.monotonic()
        text = bar(news, now - self._start) if isinstance(news, Step) else news.text
        if self.tty:
            width = shutil.get_terminal_size((80, 24)).columns - 1
            sys.stdout.write(f"\r{('setup: ' + text)[:width]}\x1b[K")
            sys.stdout.flush()
            self._drawn = True
        elif isinstance(news, Step) and now - self._last >= LOG_PERIOD_S:
            self._last = now
            say(text)
        elif isinstance(news, Doing) and news.large:
            say(text)

    def clear(self) -> None:
        if self._drawn:
            self._drawn = False
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()


def pip(*args: str, env: dict[str, str] | None = None) -> None:
    """``pip install``, its log turned into progress; only a failure shows the end of the log."""
    command = [python(), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    screen = Screen()
    with subprocess.Popen(
        [*command, "-c", str(CONSTRAINTS), *args],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                tail.append(line)
                if news := read(line):
                    screen.show(news)
        finally:
            screen.clear()
    if process.returncode:
        sys.stdout.write("".join(tail))
        fail(
            f"pip failed (exit code {process.returncode}; the end of its log is above): check the "
            "network, your package index, or the compiler's message, then run it again"
        )


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python(), *args], capture_output=True, text=True)


def install_llama() -> None:
    """Build llama-cpp-python, unless it is here in the wanted version, built as is wanted."""
    extra = wished()
    wanted = f"{LLAMA} {CMAKE_DEFAULT} {extra}".strip()
    stamp = llama_stamp()
    built = stamp.read_text() if stamp.exists() else f"{LLAMA} {CMAKE_DEFAULT}"
    have = run("-c", "import importlib.metadata as m; print(m.version('llama-cpp-python'))")
    here = have.stdout.strip() == LLAMA.split("==")[1]
    if here and built == wanted:
        return
    check_compiler()
    env = {**os.environ, "CMAKE_ARGS": f"{CMAKE_DEFAULT} {extra}".strip()}
    doing = "building" if extra else "building or taking from pip's cache:"
    say(f"{doing} {LLAMA} with CMAKE_ARGS={env['CMAKE_ARGS']!r}; a build takes five minutes")
    flags = ["-v"]
    if extra:
        # pip caches wheels by version only: one for another device may be among them.
        flags += ["--no-cache-dir", "--no-binary", LLAMA.split("==")[0]]
    if here:
        flags += ["--force-reinstall", "--no-deps"]
    start = time.monotonic()
    pip(*flags, LLAMA, env=env)
    stamp.write_text(wanted)
    say(f"llama.cpp is ready ({time.monotonic() - start:.0f} s)")


def compile_preload() -> None:
    """The library that lets the memory of a GPU sleep. Without it models are unloaded and loaded
    again instead, so that a failure here is only said."""
    stamp = VENV / "preload-stamp"
    digest = hashlib.sha256()
    for path in sorted([*PRELOAD.glob("*.[ch]"), PRELOAD / "build.py"]):
        digest.update(path.read_bytes())
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    done = run("-m", "vram_conductor.worker.vmm.build")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        say(f"without the preload library, which only a GPU needs: {last}")
        return
    stamp.write_text(digest.hexdigest())


def make_venv() -> None:
    """A venv with a pip that runs; what an interrupted run has left is completed."""
    try:
        if not (VENV / "bin" / "python").exists():
            say(f"creating {VENV.relative_to(ROOT)}")
            venv.create(VENV, with_pip=True, clear=VENV.exists())
        elif run("-m", "pip", "--version").returncode:
            say(f"completing {VENV.relative_to(ROOT)}")
            subprocess.run([python(), "-m", "ensurepip", "--default-pip"], check=True)
    except subprocess.CalledProcessError:
        fail(
            f"{VENV.relative_to(ROOT)} cannot be made: Debian, Ubuntu: apt-get install "
            "python3-venv; or remove it, and run this again with another PYTHON"
        )
    version = run("-c", "import sys; print(sys.version_info >= (3, 11))").stdout.strip()
    if version != "True":
        fail(f"{VENV.relative_to(ROOT)} has an old Python; remove it and run this again")


def setup() -> None:
    stamp = VENV / "setup-stamp"
    mark = fingerprint()
    if stamp.exists() and stamp.read_text() == mark:
        compile_preload()
        return
    check_host()
    make_venv()
    install_llama()
    say("installing the other dependencies")
    pip("-e", ".[broker,worker,models,dev]")
    compile_preload()
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
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted; run it again, it goes on from here")
        sys.exit(130)
