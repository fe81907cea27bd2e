"""Pinning through the CUDA driver: ``cuMemHostRegister`` by way of ctypes.

The driver library is the one that every CUDA runtime, of whatever version and however it was
linked, has loaded already, and a registration made through it counts for all of them (CUDA driver
API, "Memory Management"). The context is the device's primary one, which the runtimes use too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Generator

from vram_conductor.protocol.errors import FailedPrecondition, Internal, ResourceExhausted

LIBCUDA = "VRAM_CONDUCTOR_LIBCUDA"
"""Environment: path of the driver library, for tests."""

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PROBE_BYTES = 1024 * 1024


class _Rows(ctypes.Structure):
    """``CUDA_MEMCPY2D``: rows of ``width``, ``pitch`` apart on either side."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("from", "to")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("type", ctypes.c_int),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)]


_HOST, _DEVICE = 1, 2  # CUmemorytype
_ROW_BYTES = 1024

_handle = ctypes.c_void_p
_address = ctypes.c_void_p
_device_pointer = ctypes.c_uint64
_SIGNATURES: dict[str, list[type]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_handle), ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [_handle],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(_handle)],
    "cuMemHostRegister_v2": [_address, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [_address],
    "cuMemAlloc_v2": [ctypes.POINTER(_device_pointer), ctypes.c_size_t],
    "cuMemFree_v2": [_device_pointer],
    "cuMemcpyHtoD_v2": [_device_pointer, _address, ctypes.c_size_t],
    "cuMemcpyDtoH_v2": [_address, _device_pointer, ctypes.c_size_t],
    "cuMemcpy2D_v2": [ctypes.POINTER(_Rows)],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}
_TEXTS = {
    1: "CUDA_ERROR_INVALID_VALUE",
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    201: "CUDA_ERROR_INVALID_CONTEXT",
    712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
    713: "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
    800: "CUDA_ERROR_NOT_PERMITTED",
    801: "CUDA_ERROR_NOT_SUPPORTED",
}


class CudaPinner:
    """See :class:`vram_conductor.worker.pinning.Pinner`. Any thread may call it.

    Attributes:
        spans: found out with two small ranges and copies over both, in each direction, whole and
            by rows.
    """

    def __init__(self, ordinal: int = 0) -> None:
        """``ordinal``: the device, as this process numbers them.

        Raises:
            FailedPrecondition: ``no_pinning``: no driver, or one that lacks a function.
        """
        self._cuda = _Driver()
        device = ctypes.c_int()
        self._context = _handle()
        self._closed = False
        self._closing = threading.Lock()
        steps = (
            ("cuInit", 0),
            ("cuDeviceGet", ctypes.byref(device), ordinal),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device),
        )
        for name, *arguments in steps:
            result = self._cuda.call(name, *arguments)
            if result:
                raise FailedPrecondition("no_pinning", f"{name}: {self._cuda.text(result)}")
        self._device = device.value
        self.spans = self._probe()

    @contextlib.contextmanager
    def _current(self) -> Generator[None]:
        """The context is current in this thread meanwhile, and only meanwhile."""
        result = self._cuda.call("cuCtxPushCurrent_v2", self._context)
        if result:
            text = self._cuda.text(result)
            raise ResourceExhausted("pin_refused", f"the CUDA context cannot be used: {text}")
        try:
            yield
        finally:
            self._cuda.call("cuCtxPopCurrent_v2", ctypes.byref(_handle()))

    def pin(self, address: int, size: int) -> None:
        with self._current():
            result = self._cuda.call("cuMemHostRegister_v2", address, size, _PORTABLE)
        if result:
            raise ResourceExhausted(
                "pin_refused",
                f"{size} bytes of parked states cannot be pinned ({self._cuda.text(result)}); "
                "raise the limit of locked memory (ulimit -l), or lower pinned_cap",
                need_bytes=size,
                result=result,
            )

    def unpin(self, address: int) -> None:
        with self._current():
            result = self._cuda.call("cuMemHostUnregister", address)
        if result:
            raise Internal(
                "unpin_failed", f"cuMemHostUnregister: {self._cuda.text(result)}", result=result
            )

    def _probe(self) -> bool:
        """Copy over two neighbouring ranges; False where that is an error, or cannot be tried."""
        size = 2 * _PROBE_BYTES
        with mmap.mmap(-1, size) as memory, self._current():
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            starts = [address, address + _PROBE_BYTES]
            pinned = [
                start
                for start in starts
                if not self._cuda.call("cuMemHostRegister_v2", start, _PROBE_BYTES, _PORTABLE)
            ]
            try:
                return len(pinned) == 2 and self._copies(memory, address, size)
            finally:
                for start in pinned:
                    self._cuda.call("cuMemHostUnregister", start)

    def _copies(self, memory: mmap.mmap, address: int, size: int) -> bool:
        pattern = os.urandom(4096) * (size // 4096)
        memory[:] = pattern
        target = _device_pointer()
        if self._cuda.call("cuMemAlloc_v2", ctypes.byref(target), size):
            return False
        try:
            if self._cuda.call("cuMemcpyHtoD_v2", target, address, size):
                return False
            memory[:] = bytes(size)
            if self._cuda.call("cuMemcpyDtoH_v2", address, target, size) or memory[:] != pattern:
                return False
            # Every other row goes to the device without gaps, and comes back to where it was.
            host = {"type": _HOST, "host": address, "pitch": 2 * _ROW_BYTES}
            there = {"type": _DEVICE, "device": target.value, "pitch": _ROW_BYTES}
            if self._copy_rows(host, there, size):
                return False
            memory[:] = bytes(size)
            gap = bytes(_ROW_BYTES)
            expected = pattern[:_ROW_BYTES] + gap + pattern[2 * _ROW_BYTES : 3 * _ROW_BYTES] + gap
            return not self._copy_rows(there, host, size) and (
                memory[:] == expected * (size // len(expected))
            )
        finally:
            self._cuda.call("cuMemFree_v2", target)

    def _copy_rows(self, source: dict[str, int], target: dict[str, int], size: int) -> int:
        fields = {f"from_{name}": value for name, value in source.items()}
        fields |= {f"to_{name}": value for name, value in target.items()}
        rows = _Rows(width=_ROW_BYTES, rows=size // (2 * _ROW_BYTES), **fields)
        return self._cuda.call("cuMemcpy2D_v2", ctypes.byref(rows))

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                self._cuda.call("cuDevicePrimaryCtxRelease_v2", self._device)


class _Driver:
    """The functions that are used, each returning a CUresult."""

    def __init__(self) -> None:
        path = os.environ.get(LIBCUDA) or "libcuda.so.1"
        try:
            self._library = ctypes.CDLL(path)
            for name, types in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, ctypes.c_int
        except (OSError, AttributeError) as error:
            raise FailedPrecondition("no_pinning", f"no usable CUDA driver: {error}") from None

    def call(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def text(self, result: int) -> str:
        name = ctypes.c_char_p()
        if self.call("cuGetErrorName", result, ctypes.byref(name)) == 0 and name.value:
            return name.value.decode("ascii", "replace")
        return _TEXTS.get(result, f"CUDA error {result}")
