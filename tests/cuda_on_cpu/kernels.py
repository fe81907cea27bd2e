"""CUDA kernels compiled for the CPU with g++, for tests on machines without a GPU.

``compile_kernels(source, folder).launch(name, grid, block, arguments, shared_bytes)`` runs a kernel
and returns when it is done. See ``cuda.h`` for what is offered and what is stricter than a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import threading
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent
BUILD_S = 300.0
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-w", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing")

Argument = np.generic | NDArray[np.generic] | int | None
"""A scalar (``np.int32``, ``np.float32`` …), an array (its address), an address, or null."""

_KINDS = {
    "float32": "f",
    "float64": "d",
    "int32": "i",
    "uint32": "i",
    "int64": "l",
    "uint64": "l",
}
"""What ``kind_of`` in cuda.h says of a scalar; a pointer's is ``p``."""

_KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w\s]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)
_ONE_LAUNCH = threading.Lock()
"""A library's shared memory and fibers are global to it."""


class KernelError(Exception):
    """A kernel that doesn't compile, a launch that a GPU would refuse, or what a kernel did."""


class Kernels:
    """The kernels of one source; all names are in :attr:`names`."""

    def __init__(self, library: Path, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        self._library = ctypes.CDLL(str(library))

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> None:
        """Run it to its end.

        Raises:
            KernelError: an unknown name; arguments of other kinds than the kernel's; what a GPU
                would hang on or fault at.
        """
        if name not in self.names:
            raise KernelError(f"no kernel {name}; there are {', '.join(sorted(self.names))}")
        values = [_value(argument) for argument in arguments]
        kinds = "".join(kind for kind, _ in values)
        pointers = (ctypes.c_void_p * max(len(values), 1))(
            *(value.ctypes.data for _, value in values)
        )
        call = self._library[f"launch_{name}"]
        call.restype = ctypes.c_char_p
        with _ONE_LAUNCH:
            wrong = call(
                _three(grid), _three(block), ctypes.c_uint(shared_bytes), pointers, kinds.encode()
            )
        if wrong:
            raise KernelError(f"{name}: {wrong.decode()}")


@functools.cache
def compile_kernels(source: str, folder: Path) -> Kernels:
    """Compile a source with all its ``extern "C"`` kernels; again only if it, or what it is
    compiled with, has changed. Several processes may do so in one folder.

    Raises:
        KernelError: the compiler's log.
    """
    parts = (source.encode(), *(file.read_bytes() for file in sorted(HERE.glob("*.h"))))
    key = sha256(repr((FLAGS, _LAUNCHER, _run("g++", "--version"), parts)).encode())
    stem = folder / f"kernels-{key.hexdigest()[:16]}"
    library = stem.with_suffix(".so")
    folder.mkdir(parents=True, exist_ok=True)
    # Macros first: a kernel's name may be made by one.
    plain = _run("g++", "-E", "-x", "c++", "-DCUDA_ON_CPU", "-", given=source)
    plain = _DYNAMIC_SHARED.sub(
        r"\1* const \2 = static_cast<\1*>(cuda_on_cpu::dynamic_shared());", plain
    )
    names = _KERNEL.findall(plain)
    if not library.exists():
        mine = f"{os.getpid()}-{threading.get_ident()}"
        text, parts_of, made = (stem.with_suffix(f".{mine}.{end}") for end in ("cpp", "o", "so"))
        text.write_text(
            '#include "tensor_cores.h"\n' + plain + "".join(_LAUNCHER.format(name=n) for n in names)
        )
        flags = (*FLAGS, f"-I{HERE}", "-fsanitize=alignment")
        _run("g++", *flags, "-c", str(text), "-o", str(parts_of))
        # Without the sanitizer's own library: cuda.h says what happens.
        _run("g++", "-shared", str(parts_of), "-o", str(made))
        for file in (text, parts_of):
            file.unlink()
        made.rename(library)
    return Kernels(library, names)


_LAUNCHER = """
extern "C" const char* launch_{name}(const unsigned* grid, const unsigned* block, unsigned shared,
                                     void** arguments, const char* kinds) {{
    return cuda_on_cpu::launch({name}, grid, block, shared, arguments, kinds);
}}
"""


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        raise KernelError(f"{' '.join(command)}\n{done.stderr}")
    return done.stdout


def _three(size: Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*size, *(1,) * (3 - len(size)))


def _value(argument: Argument) -> tuple[str, NDArray[np.generic]]:
    """Its kind, and where its value lies."""
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise KernelError("an array must be contiguous: its address is all a kernel gets")
        return "p", np.array(argument.ctypes.data, np.uint64)
    if isinstance(argument, np.generic):
        if argument.dtype.name not in _KINDS:
            raise KernelError(f"a kernel takes no {argument.dtype}")
        return _KINDS[argument.dtype.name], np.array(argument)
    return "p", np.array(argument or 0, np.uint64)
