"""Whether device memory can sleep here, and starting the worker so that it can.

A preload is decided when a process starts, so a cuda worker begins by starting itself again with
``LD_PRELOAD`` (:func:`enter`): in the same process, with the same descriptors, whoever started it.
What was in ``LD_PRELOAD`` before stays behind it, and processes that the worker starts get their
environment without it.

``python -m vram_conductor.worker.vmm.preload`` prints as JSON what it finds.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import msgspec

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.vmm.build import build

MARK = "VRAM_CONDUCTOR_PRELOADED"
"""Set while the process starts itself again; holds ``LD_PRELOAD`` as it was before."""

TRIAL_S = 60.0

SWITCHED_OFF = "switched off in the configuration (device sleep = off)"

_TRIAL = """\
import ctypes, sys
library = ctypes.CDLL(None)
library.vmm_abi()
why = ctypes.create_string_buffer(16 + 256)
if sys.argv[1] == "driver" and library.vmm_open(why):
    sys.exit(why.raw[16:].split(b"\\0")[0].decode("utf-8", "replace"))
"""

_reason = ""


class Finding(msgspec.Struct, frozen=True):
    """Whether a worker can be started so that its device memory can sleep.

    Attributes:
        path: the library to preload; empty: it cannot.
        why: why not, and what to do; empty where it can.
    """

    path: str = ""
    why: str = ""


def find(env: Mapping[str, str], *, driver: bool = False) -> Finding:
    """Look; compiles the library where that is still to be done and there is a compiler.

    Args:
        env: the environment of the worker that would be started.
        driver: ask the NVIDIA driver, too. (The worker does anyway, after its start.)
    """
    if why := unfit_llama(llama_folder(env)):
        return Finding(why=why)
    try:
        path = build(env)
    except ConductorError as error:
        return Finding(why=error.info.message)
    why = trial(path, env, driver=driver)
    return Finding(why=why) if why else Finding(path=str(path))


def llama_folder(env: Mapping[str, str]) -> Path | None:
    """Where the shared libraries of llama-cpp-python are; it is not imported."""
    if given := env.get("LLAMA_CPP_LIB_PATH"):
        return Path(given)
    spec = importlib.util.find_spec("llama_cpp")
    return Path(spec.origin).parent / "lib" if spec and spec.origin else None


def unfit_llama(folder: Path | None) -> str:
    """Why calls of ``cudaMalloc`` by this llama.cpp cannot be seen; empty if they can."""
    if folder is None:
        return "llama-cpp-python is not installed; in a clone of the project: make setup"
    library = next(iter(sorted(folder.glob("libggml-cuda*.so*"))), None)
    if library is None:
        return (
            "llama-cpp-python was built without CUDA; in a clone of the project: "
            "CMAKE_ARGS=-DGGML_CUDA=on make setup"
        )
    # A name in the table of what the dynamic linker is to load; a static runtime has none there.
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"\0libcudart.so") >= 0:
            return ""
    return (
        f"{library} brings a CUDA runtime of its own (static), whose allocations cannot be taken "
        "over; in a clone of the project: CMAKE_ARGS='-DGGML_CUDA=on -DGGML_STATIC=off' make setup"
    )


def trial(path: Path, env: Mapping[str, str], *, driver: bool) -> str:
    """Start a process with the library; why that does not work, or empty."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRIAL, "driver" if driver else "loader"],
            env={**env, "LD_PRELOAD": preload_value(path, env.get("LD_PRELOAD", ""))},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TRIAL_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"the NVIDIA driver gave no answer within {TRIAL_S:.0f} s"
    if not done.returncode:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    # What the loader says comes first, and explains whatever came of it.
    loader = next((line for line in lines if "ld.so" in line or "shared librar" in line), "")
    if loader:
        return f"{path} cannot be preloaded ({loader}); remove it, and it is compiled again"
    return lines[-1] if lines else f"a process with {path} ended with code {done.returncode}"


def preload_value(path: Path, before: str) -> str:
    """``LD_PRELOAD`` with ``path`` in front of what is there. *Pure.*"""
    return f"{path}:{before}" if before else str(path)


def enter(device_kind: str, sleep: str, argv: Sequence[str], env: MutableMapping[str, str]) -> None:
    """Called first of all in a worker: may not return, but begin the process again.

    Args:
        device_kind: ``cuda`` or ``cpu``; only cuda memory sleeps.
        sleep: the device's ``sleep`` setting.
        argv: the interpreter's arguments, to begin again with.
        env: this process's environment; tidied when it has begun again.
    """
    global _reason
    if MARK in env:
        before = env.pop(MARK)
        env.pop("LD_PRELOAD", None)
        if before:
            env["LD_PRELOAD"] = before
        if not loaded():
            _reason = "the loader did not take the preload library"
        return
    if device_kind != "cuda":
        _reason = "only memory of a cuda device sleeps"
        return
    if sleep == "off":
        _reason = SWITCHED_OFF
        return
    finding = find(env)
    _reason = finding.why
    if finding.path:
        before = env.get("LD_PRELOAD", "")
        preload = preload_value(Path(finding.path), before)
        os.execve(
            sys.executable, [sys.executable, *argv], {**env, "LD_PRELOAD": preload, MARK: before}
        )


def loaded() -> bool:
    """Whether this process has the library."""
    return hasattr(ctypes.CDLL(None), "vmm_abi")


def reason() -> str:
    """Why this process is without it, as far as :func:`enter` has found out; else empty."""
    return _reason


def main() -> int:
    """Entry point: one JSON value on stdout."""
    finding = find(os.environ, driver=True)
    sys.stdout.write(msgspec.json.encode(finding).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
