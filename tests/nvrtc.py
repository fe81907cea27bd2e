"""NVIDIA's run-time compiler, from PyPI's nvidia-cuda-nvrtc-cu12: it needs no GPU.

The calls are those of https://docs.nvidia.com/cuda/nvrtc (section 3, "User Interface").
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class CompileError(Exception):
    """The compiler's log."""


@dataclass(frozen=True)
class Usage:
    """What one kernel takes, per thread (registers, bytes spilled) and per block (shared bytes)."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Machine code (an ELF file) and what each kernel in it takes."""

    cubin: bytes
    usage: dict[str, Usage]


def compile_cubin(source: str, arch: str) -> Compiled:
    """Compile to machine code of ``arch`` (``sm_61`` …), with the options that :mod:`cuda` uses.

    Raises:
        CompileError: it doesn't compile.
    """
    library = _library()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
    )
    try:
        options = [f"-arch={arch}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
        given = (ctypes.c_char_p * len(options))(*options)
        failed = library.nvrtcCompileProgram(program, len(options), given)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).decode()
        if failed:
            raise CompileError(f"{arch}: {log}")
        return Compiled(
            _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), _usage(log)
        )
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    assert found, "pip install nvidia-cuda-nvrtc-cu12 (among the development packages)"
    folder = Path(next(iter(found.submodule_search_locations or ()))) / "lib"
    # The compiler opens this one by its name.
    for name in ("libnvrtc-builtins.so.12.*", "libnvrtc.so.12"):
        library = ctypes.CDLL(str(next(folder.glob(name))), mode=ctypes.RTLD_GLOBAL)
    return library


def _check(status: int) -> None:
    assert not status, f"NVRTC error {status}"


def _text(size: Callable[..., int], get: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    n_bytes = ctypes.c_size_t()
    _check(size(program, ctypes.byref(n_bytes)))
    buffer = ctypes.create_string_buffer(n_bytes.value)
    _check(get(program, buffer))
    return buffer.raw


def _usage(log: str) -> dict[str, Usage]:
    usage: dict[str, Usage] = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        numbers = {
            word: re.search(rf"(\d+) {phrase}", part)
            for word, phrase in (
                ("registers", "registers"),
                ("spilled", "bytes spill stores"),
                ("shared", "bytes smem"),
            )
        }
        values = {word: int(found[1]) if found else 0 for word, found in numbers.items()}
        usage[part.split("'")[0]] = Usage(values["registers"], values["spilled"], values["shared"])
    return usage
