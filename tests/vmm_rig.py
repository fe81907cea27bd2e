"""The preload library, compiled, and processes that run with it: on stand-ins for libcuda and
libcudart (``tests/cuda_stub``), or on a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from vmm_device import PIECE

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.vmm import build

TESTS = Path(__file__).resolve().parent
STUB = TESTS / "cuda_stub"
PATIENCE_S = 120.0


def compile_c(
    sources: list[Path], target: Path, *flags: str, command: list[str] | None = None
) -> Path:
    """A shared library; skips the test where there is no compiler."""
    try:
        command = command or build.compiler(os.environ)
    except FailedPrecondition as error:
        pytest.skip(error.info.message)
    subprocess.run(
        [*command, *build.FLAGS, "-Werror", *map(str, sources), "-o", str(target), *flags],
        check=True,
    )
    return target


@dataclass(frozen=True)
class Rig:
    """What was compiled.

    Attributes:
        vmm: the preload library.
        env: makes a process use it, and the stand-ins where there are some.
    """

    vmm: Path
    env: dict[str, str]

    def run(self, module: str, *arguments: str, **env: str) -> str:
        """``python -m module``: its output; fails the test with it where it fails."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            pytest.fail(f"{done.stdout}\nexit code {done.returncode}", pytrace=False)
        return done.stdout


def vmm_library(folder: Path) -> Path:
    """The preload library as the product's flags make it, without a warning, but for one thing:
    pinned memory comes in pieces of 64 KiB and is copied in pieces of 40, so that there are
    several of them."""
    sizes = ["-DCHUNK=65536", f"-DPIECE={PIECE}"]
    return compile_c(list(build.SOURCES), folder / "vmm.so", *build.LIBRARIES, *sizes)


def stub_rig(folder: Path) -> Rig:
    """On the stand-ins."""
    visible = ["-fvisibility=default", f"-Wl,-rpath,{folder}", f"-L{folder}"]
    cuda = compile_c([STUB / "cuda.c"], folder / "libcuda_stub.so", "-pthread", *visible)
    runtime = folder / "libcudart.so.99"
    script = f"-Wl,--version-script={STUB / 'cudart.map'}"
    link = ["-pthread", script, "-Wl,-soname,libcudart.so.99", "-lcuda_stub", *visible]
    compile_c([STUB / "cudart.c"], runtime, *link)
    client = folder / "libclient.so"
    compile_c([STUB / "client.c"], client, "-l:libcudart.so.99", *visible)
    vmm = vmm_library(folder)
    return Rig(
        vmm,
        {
            "LD_PRELOAD": str(vmm),
            "VRAM_CONDUCTOR_LIBCUDA": str(cuda),
            "STUB_CUDA": str(cuda),
            "STUB_CLIENT": str(client),
            "STUB_RUNTIME": str(runtime),
            "PYTHONPATH": str(TESTS),
        },
    )
