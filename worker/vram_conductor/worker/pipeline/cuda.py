"""CUDA through CuPy: the only module that imports it. It uses its compiler, and the runtime's and
the driver's own calls.

Memory comes from ``cudaMalloc``, not from CuPy's pool: what the driver says is in use is what was
allocated. Kernels are launched through the driver, with arguments that were laid out before: a
token takes hundreds of launches.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
)
from vram_conductor.worker.pipeline.cuda_call import do
from vram_conductor.worker.pipeline.cuda_module import CudaModule
from vram_conductor.worker.pipeline.gpu import Event, Stream
from vram_conductor.worker.pipeline.host_region import host_region
from vram_conductor.worker.vram import NvmlSampler, cuda_ordinal

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_READY = 600  # cudaErrorNotReady
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable


def load_cupy() -> Any:
    """The ``cupy`` module.

    Raises:
        FailedPrecondition: ``cupy_missing``.
    """
    # Else a module's kernels would all be loaded at the first use of one.
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    try:
        import cupy
    except ImportError as error:
        raise FailedPrecondition(
            "cupy_missing",
            f"layers are streamed to a GPU through CuPy ({error}): in a clone of the "
            "project, .venv/bin/pip install -e '.[cuda]' for CUDA 12, '.[cuda13]' for CUDA 13; "
            "or use --device cpu",
        ) from None
    return cupy


class Cuda:
    """See :class:`vram_conductor.worker.pipeline.gpu.Gpu`.

    Args:
        ordinal: the device, as CUDA numbers those that this process sees.

    Raises:
        FailedPrecondition: ``cupy_missing``.
        FailedPrecondition: ``no_device``.
    """

    _chosen: ClassVar[str | None] = None
    """The only GPU that this process sees, as it was called before."""

    def __init__(self, ordinal: int = 0) -> None:
        self._cupy = load_cupy()
        self._runtime = self._cupy.cuda.runtime
        found: dict[str, Any] = {}
        try:
            count = int(self._runtime.getDeviceCount())
            if ordinal < count:
                self._runtime.setDevice(ordinal)
                # Makes the context: what is free is told without it from now on.
                self._runtime.free(0)
                found = self._runtime.getDeviceProperties(ordinal)
        except self._runtime.CUDARuntimeError as error:
            raise FailedPrecondition(
                "no_device",
                f"CUDA can use no GPU here ({error}): check the driver and CUDA_VISIBLE_DEVICES, "
                "or use --device cpu",
            ) from None
        if ordinal >= count:
            raise FailedPrecondition(
                "no_device", f"CUDA shows {count} GPUs, and none is number {ordinal}"
            )
        self.name: str = found["name"].decode()
        self.capability = (int(found["major"]), int(found["minor"]))
        self.multiprocessors = int(found["multiProcessorCount"])

    @classmethod
    def of(cls, device: str) -> Cuda:
        """``cuda:N`` as NVML and ``CUDA_VISIBLE_DEVICES`` number it. From then on the process sees
        only this device.

        Raises:
            NotFound: ``no_such_device``.
            FailedPrecondition: ``cupy_missing``, ``nvml_missing``, ``driver_mismatch``;
                ``cuda_in_use``: too late to choose.
            FailedPrecondition: ``no_device``.
            Unavailable: ``no_driver``, ``gpu_lost``, ``nvml_error``.
        """
        runtime = load_cupy().cuda.runtime
        name = f"cuda:{cuda_ordinal(device)}"
        if cls._chosen not in (None, name):
            # By now it would be another GPU's number, or nobody's.
            raise FailedPrecondition(
                "cuda_in_use",
                f"this process chose {cls._chosen} and sees no other GPU: use {name} in a process "
                "of its own",
            )
        if cls._chosen is None:
            sampler = NvmlSampler(name)
            os.environ["CUDA_VISIBLE_DEVICES"] = sampler.uuid
            sampler.close()
            cls._chosen = name
        cuda = cls(0)
        if runtime.getDeviceCount() != 1:
            raise FailedPrecondition(
                "cuda_in_use",
                f"this process used CUDA before {name} was chosen: choose it with "
                "CUDA_VISIBLE_DEVICES, and name it cuda:0",
            )
        return cuda

    @property
    def total_bytes(self) -> int:
        return int(do(self._runtime.memGetInfo)[1])

    @property
    def free_bytes(self) -> int:
        return int(do(self._runtime.memGetInfo)[0])

    def allocate(self, n_bytes: int) -> CudaMemory:
        try:
            return CudaMemory(self._runtime, self._runtime.malloc(max(1, n_bytes)), n_bytes)
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise Internal("cuda_failed", f"CUDA refuses memory: {error}") from None
        free_bytes, total_bytes = self.free_bytes, self.total_bytes
        raise ResourceExhausted(
            "device_memory_short",
            f"{n_bytes} bytes are needed in one piece, and {free_bytes} of {total_bytes} are free "
            f"on {self.name}: end what else uses it, or take a smaller window, context or batch",
            need_bytes=n_bytes,
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )

    def pinned(self, n_bytes: int) -> CudaPinned:
        return CudaPinned(self._runtime, n_bytes)

    def stream(self) -> CudaStream:
        return CudaStream(self._runtime)

    def event(self, timed: bool = False) -> CudaEvent:
        return CudaEvent(self._runtime, timed)

    def copy_to_device(self, address: int, array: NDArray[Any], stream: Stream) -> None:
        assert array.flags.c_contiguous
        kind = self._runtime.memcpyHostToDevice
        data = array.ctypes.data
        do(self._runtime.memcpyAsync, address, data, array.nbytes, kind, stream.handle)

    def copy_to_host(self, array: NDArray[Any], address: int, stream: Stream) -> None:
        assert array.flags.c_contiguous
        kind = self._runtime.memcpyDeviceToHost
        data = array.ctypes.data
        do(self._runtime.memcpyAsync, data, address, array.nbytes, kind, stream.handle)

    def fill(self, address: int, value: int, n_bytes: int, stream: Stream) -> None:
        do(self._runtime.memsetAsync, address, value, n_bytes, stream.handle)

    def module(self, source: str) -> CudaModule:
        return CudaModule(self._cupy, source)

    def close(self) -> None:
        """The context stays until the process ends: others may use it, too."""


class CudaMemory:
    """See :class:`vram_conductor.worker.pipeline.gpu.DeviceMemory`."""

    def __init__(self, runtime: Any, address: int, n_bytes: int) -> None:
        self._runtime = runtime
        self.address = address
        self.n_bytes = n_bytes

    def free(self) -> None:
        address, self.address = self.address, 0
        # After an error of the device itself nothing can be given back: the driver does it when
        # the process ends.
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            if address:
                self._runtime.free(address)


class CudaPinned:
    """See :class:`vram_conductor.worker.pipeline.gpu.PinnedMemory`."""

    def __init__(self, runtime: Any, n_bytes: int) -> None:
        self._runtime = runtime
        self.array = host_region(n_bytes)
        self._address = self.array.ctypes.data
        try:
            runtime.hostRegister(self._address, max(1, n_bytes), _REGISTER_PORTABLE)
        except runtime.CUDARuntimeError as error:
            raise ResourceExhausted(
                "pin_refused",
                f"{n_bytes} bytes of the host cannot be pinned ({error}): raise the limit of "
                "locked memory (ulimit -l), or take a smaller model",
                need_bytes=n_bytes,
            ) from None

    def free(self) -> None:
        address, self._address = self._address, 0
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            if address:
                self._runtime.hostUnregister(address)
        # Only now: without its last view the region is unmapped, and its address somebody else's.
        self.array = np.empty(0, np.uint8)


class CudaEvent:
    """See :class:`vram_conductor.worker.pipeline.gpu.Event`."""

    def __init__(self, runtime: Any, timed: bool) -> None:
        self._runtime = runtime
        flags = runtime.eventDefault if timed else runtime.eventDisableTiming
        self.handle: int = do(runtime.eventCreateWithFlags, flags)

    def record(self, stream: Stream) -> None:
        do(self._runtime.eventRecord, self.handle, stream.handle)

    def done(self) -> bool:
        # CuPy returns the status here; elsewhere it raises it.
        status = self._runtime.eventQuery(self.handle)
        if status not in (0, _NOT_READY):
            raise Internal("cuda_failed", f"CUDA lost an event: error {status}")
        return bool(status == 0)

    def synchronise(self) -> None:
        do(self._runtime.eventSynchronize, self.handle)

    def ms_since(self, earlier: Event) -> float:
        return float(do(self._runtime.eventElapsedTime, earlier.handle, self.handle))

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            if handle:
                self._runtime.eventDestroy(handle)


class CudaStream:
    """See :class:`vram_conductor.worker.pipeline.gpu.Stream`. Nothing on the default stream, where
    CuPy itself works, holds it up."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.handle: int = do(runtime.streamCreateWithFlags, runtime.streamNonBlocking)

    def wait(self, event: Event) -> None:
        do(self._runtime.streamWaitEvent, self.handle, event.handle)

    def synchronise(self) -> None:
        do(self._runtime.streamSynchronize, self.handle)

    def close(self) -> None:
        handle, self.handle = self.handle, 0
        with contextlib.suppress(self._runtime.CUDARuntimeError):
            if handle:
                self._runtime.streamDestroy(handle)
