"""A device whose memory sleeps, as scenes see it: the stand-in's, or a real GPU's. Runs in a
process that has the preload library."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Protocol

from vram_conductor.worker.pin_cuda import CudaPinner
from vram_conductor.worker.vmm.library import Vmm

KIB, MIB = 1 << 10, 1 << 20
PIECE = 40 << 10
"""What the tests' own library copies in at a time."""


class Device(Protocol):
    """Memory by the runtime's interface.

    Attributes:
        unit: what it rounds up to.
        slack_bytes: what the driver takes for itself now and then.
    """

    vmm: Vmm
    unit: int
    slack_bytes: int

    def malloc(self, size: int) -> int:
        """The address; MemoryError where it is refused."""
        ...

    def free(self, address: int) -> int:
        """The runtime's error code."""
        ...

    def write(self, address: int, data: bytes) -> None: ...

    def read(self, address: int, size: int) -> bytes: ...

    def used_bytes(self) -> int:
        """Device memory that is taken."""
        ...

    def pin(self) -> None:
        """Pin memory as that of parked states is pinned, and let go of it."""

    def recording(self) -> AbstractContextManager[None]:
        """A stream records a graph inside, as ggml-cuda does it; that it went well is checked."""
        ...


class Counts(ctypes.Structure):
    """What the stand-in counts."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "calls",
            "ranges",
            "memories",
            "used_bytes",
            "host_blocks",
            "host_bytes",
            "streams",
            "pushed",
            "in_bytes",
            "out_bytes",
            "synchronised",
            "ahead_bytes",
        )
    ]

    def held(self) -> dict[str, int]:
        """All that can leak."""
        names = ("ranges", "memories", "used_bytes", "host_blocks", "streams")
        return {name: int(getattr(self, name)) for name in names}


class StubDevice:
    """On the stand-ins; memory is main memory, so that it is read and written in place."""

    unit = 64 * KIB
    slack_bytes = 0

    def __init__(self) -> None:
        # Locally, as ctypes loads llama.cpp: the library has to find the runtime by itself.
        self.client = ctypes.CDLL(os.environ["STUB_CLIENT"])
        self.runtime = ctypes.CDLL(os.environ["STUB_RUNTIME"])
        self.stub = ctypes.CDLL(os.environ["STUB_CUDA"])
        self.client.client_free.argtypes = [ctypes.c_void_p]
        self.client.client_malloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
        self.stub.stub_caps.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.stub.stub_hog.argtypes = [ctypes.c_int64]
        self.vmm = Vmm.open()

    def malloc(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        code = self.client.client_malloc(pointer, size)
        if code:
            raise MemoryError(code)
        return pointer.value or 0

    def free(self, address: int) -> int:
        return int(self.client.client_free(address))

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def counts(self) -> Counts:
        counts = Counts()
        self.stub.stub_counts(ctypes.byref(counts))
        return counts

    def used_bytes(self) -> int:
        return int(self.counts().used_bytes)

    def arm(self, nth: int, name: str = "", code: int = 719) -> None:
        """Let the ``nth`` driver call from now fail (of ``name``, or of any); 0: none."""
        self.stub.stub_arm(name.encode(), nth, code)

    def caps(self, device_bytes: int, host_bytes: int = 256 * MIB) -> None:
        self.stub.stub_caps(device_bytes, host_bytes)

    def pin(self) -> None:
        pass  # by other means, see pinning.c

    @contextmanager
    def recording(self) -> Generator[None]:
        self.stub.stub_record(1)
        yield
        assert self.stub.stub_record(0), "the context was waited for"

    @contextmanager
    def hog(self, size: int) -> Generator[None]:
        """Somebody else takes ``size`` bytes of the device."""
        self.stub.stub_hog(size)
        try:
            yield
        finally:
            self.stub.stub_hog(-size)


_NON_BLOCKING, _RELAXED = 1, 2
"""``cudaStreamNonBlocking``, ``cudaStreamCaptureModeRelaxed``"""


class CudaDevice:
    """A real GPU; the runtime is the one that llama.cpp would load."""

    unit = 2 * MIB
    slack_bytes = 4 * MIB

    def __init__(self) -> None:
        self.runtime = ctypes.CDLL(cudart(), mode=ctypes.RTLD_GLOBAL)
        self.calls = ctypes.CDLL(None)  # finds the preloaded ones first
        void, size = ctypes.c_void_p, ctypes.c_size_t
        self.calls.cudaMalloc.argtypes = [ctypes.POINTER(void), size]
        self.calls.cudaFree.argtypes = [void]
        self.runtime.cudaMemcpy.argtypes = [void, void, size, ctypes.c_int]
        self.runtime.cudaMemGetInfo.argtypes = [ctypes.POINTER(size), ctypes.POINTER(size)]
        self.vmm = Vmm.open()

    def malloc(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        code = self.calls.cudaMalloc(pointer, size)
        if code:
            raise MemoryError(code)
        return pointer.value or 0

    def free(self, address: int) -> int:
        return int(self.calls.cudaFree(address))

    def write(self, address: int, data: bytes) -> None:
        assert not self.runtime.cudaMemcpy(address, data, len(data), 1)

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        assert not self.runtime.cudaMemcpy(data, address, size, 2)
        return data.raw

    def used_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert not self.runtime.cudaMemGetInfo(free, total)
        return total.value - free.value

    @cached_property
    def _pinner(self) -> CudaPinner:
        return CudaPinner()

    def pin(self) -> None:
        pinner = self._pinner
        with mmap.mmap(-1, MIB) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            pinner.pin(address, MIB)
            pinner.unpin(address)

    @contextmanager
    def recording(self) -> Generator[None]:
        runtime, stream, graph = self.runtime, ctypes.c_void_p(), ctypes.c_void_p()
        written = self.malloc(MIB)
        assert not runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), _NON_BLOCKING)
        assert not runtime.cudaStreamBeginCapture(stream, _RELAXED)
        call = (ctypes.c_void_p(written), 0, ctypes.c_size_t(MIB), stream)
        assert not runtime.cudaMemsetAsync(*call)
        yield
        assert not runtime.cudaMemsetAsync(*call)
        assert not runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)), "it was spoilt"
        assert graph.value
        assert not runtime.cudaGraphDestroy(graph)
        assert not runtime.cudaStreamDestroy(stream)
        assert not self.free(written)


def cudart() -> str:
    """Name of the CUDA runtime on this machine."""
    for major in (13, 12, 11):
        try:
            ctypes.CDLL(f"libcudart.so.{major}")
        except OSError:
            continue
        return f"libcudart.so.{major}"
    raise FileNotFoundError("no libcudart: set LD_LIBRARY_PATH to the CUDA toolkit's lib64")


def open_device() -> StubDevice | CudaDevice:
    """The stand-in where the environment names it, else the GPU."""
    return StubDevice() if "STUB_CLIENT" in os.environ else CudaDevice()
