"""Faults in the CUDA calls of a running process (``tests/gpu/fault.c``)."""

from __future__ import annotations

import ctypes
import mmap
import struct
from pathlib import Path

from vmm_rig import TESTS, compile_c

SOURCE = TESTS / "gpu" / "fault.c"
OUT_OF_MEMORY = 2
FREE = "free"
_ORDER = struct.Struct("=32siiii")


class FaultFile:
    """What is to fail, in the file that the shim looks into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def arm(self, name: str, nth: int = 1, code: int = OUT_OF_MEMORY) -> None:
        """The ``nth`` call of ``name`` from now fails; 0: none."""
        with self.path.open("r+b") as file:
            file.write(_ORDER.pack(name.encode(), nth, code, 0, 0))

    def keep(self) -> None:
        """From now on, until :meth:`arm`, the device keeps what is given back to it, and says that
        all is well."""
        self.arm(FREE, 0)

    def fired(self) -> int:
        """How many calls have failed since :meth:`arm`, or were to no avail since :meth:`keep`."""
        return int(self._read()[3])

    def calls(self) -> int:
        """How many calls of that name there were since :meth:`arm`."""
        return int(self._read()[4])

    def _read(self) -> tuple[bytes, int, int, int, int]:
        name, countdown, code, fired, calls = _ORDER.unpack_from(self.path.read_bytes())
        return name, countdown, code, fired, calls


class Fault(FaultFile):
    """The shim, compiled.

    Args:
        folder: for the library and the file.
        libcuda, libcudart: the real ones, by path.

    Attributes:
        env: for a process whose calls may fail; a worker that is started with it takes the
            preload library in front.
    """

    def __init__(self, folder: Path, libcuda: str, libcudart: str) -> None:
        super().__init__(folder / "fault.order")
        self.path.write_bytes(bytes(mmap.PAGESIZE))
        library = folder / "fault.so"
        # Linked with the driver: whoever asks this library for a function that it does not wrap
        # gets the driver's.
        flags = ["-fvisibility=default", f"-Wl,-rpath,{Path(libcuda).parent}", "-ldl"]
        compile_c([SOURCE], library, "-Wl,--no-as-needed", libcuda, *flags)
        self.env = {
            "LD_PRELOAD": str(library),
            "VRAM_CONDUCTOR_LIBCUDA": str(library),
            "FAULT_FILE": str(self.path),
            "FAULT_LIBCUDA": libcuda,
            "FAULT_LIBCUDART": libcudart,
        }


def loaded_path(name: str) -> str:
    """Path of ``libcuda.so.1`` or ``libcudart.so.13``, which is loaded for it."""
    ctypes.CDLL(name)
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name.partition(".")[0] + ".so"):
            return path
    raise FileNotFoundError(name)
