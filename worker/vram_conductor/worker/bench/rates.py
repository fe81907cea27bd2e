"""How fast this machine copies: the reference that a bench is judged by.

On cuda: pinned host memory to the device, back, and both at once, through libcuda alone, timed by
CUDA events. On cpu, where a "copy to the device" is one in memory: numpy's copy. GB/s are 1e9
bytes per second, medians of several copies.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from typing import Any

import numpy as np

from vram_conductor.protocol.errors import Internal, Unavailable

COPY_BYTES = 256 << 20
REPEATS = 9


def copy_rates(device: str, n_bytes: int = COPY_BYTES, repeats: int = REPEATS) -> dict[str, Any]:
    """``h2d_gb_s``, ``d2h_gb_s``, ``both_gb_s`` (each way, both at once) of a device.

    Raises:
        Unavailable: ``no_driver``.
        Internal: ``cuda_failed``.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda":
        with Pinned(int(index or 0), n_bytes) as pinned:
            return {"device": device, "bytes": n_bytes, "kind": "pinned"} | pinned.measure(repeats)
    rate = memory_rate(min(n_bytes, COPY_BYTES // 4), repeats)
    found = {"h2d_gb_s": rate, "d2h_gb_s": rate, "both_gb_s": rate}
    return {"device": device, "bytes": n_bytes, "kind": "memcpy"} | found


def memory_rate(n_bytes: int, repeats: int) -> float:
    """GB/s of one copy in main memory, by one thread."""
    source, target = np.ones(n_bytes, np.uint8), np.zeros(n_bytes, np.uint8)
    seconds: list[float] = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return round(n_bytes / statistics.median(seconds[1:]) / 1e9, 3)


class Pinned:
    """A pinned buffer, two on the device, two streams. Driver API functions by name."""

    def __init__(self, index: int, n_bytes: int) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable("no_driver", f"no NVIDIA driver here ({error})") from None
        self._bytes = n_bytes
        self._context, self._device = ctypes.c_void_p(), ctypes.c_int()
        self._do("cuInit", 0)
        self._do("cuDeviceGet", ctypes.byref(self._device), index)
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._do("cuCtxSetCurrent", self._context)
        self._host = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._there = [ctypes.c_uint64(), ctypes.c_uint64()]
        self._streams = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._events = [ctypes.c_void_p() for _ in range(4)]
        for host, there, stream in zip(self._host, self._there, self._streams, strict=True):
            self._do("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(n_bytes), 0)
            # Pages that were never touched would be the same zero page.
            ctypes.memset(host, 1, n_bytes)
            self._do("cuMemAlloc_v2", ctypes.byref(there), ctypes.c_size_t(n_bytes))
            self._do("cuStreamCreate", ctypes.byref(stream), 1)
        for event in self._events:
            self._do("cuEventCreate", ctypes.byref(event), 0)

    def _do(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise Internal("cuda_failed", f"{name} failed with error {code}", cuda=code)

    def measure(self, repeats: int) -> dict[str, float]:
        """All three, in GB/s."""
        sides: dict[str, tuple[int, ...]] = {
            "h2d_gb_s": (0,),
            "d2h_gb_s": (1,),
            "both_gb_s": (0, 1),
        }
        return {name: self._rate(side, repeats) for name, side in sides.items()}

    def _rate(self, sides: tuple[int, ...], repeats: int) -> float:
        """``sides``: 0 to the device, 1 back; each on its own stream. The slower one counts."""
        found: list[float] = []
        for _ in range(repeats + 1):
            for side in sides:
                self._do("cuEventRecord", self._events[2 * side], self._streams[side])
                self._copy(side)
                self._do("cuEventRecord", self._events[2 * side + 1], self._streams[side])
            for side in sides:
                self._do("cuStreamSynchronize", self._streams[side])
            found.append(max(self._elapsed_ms(side) for side in sides))
        return round(self._bytes / statistics.median(found[1:]) / 1e6, 3)

    def _copy(self, side: int) -> None:
        host, there, stream = self._host[side], self._there[side], self._streams[side]
        size = ctypes.c_size_t(self._bytes)
        if side == 0:
            self._do("cuMemcpyHtoDAsync_v2", there, host, size, stream)
        else:
            self._do("cuMemcpyDtoHAsync_v2", host, there, size, stream)

    def _elapsed_ms(self, side: int) -> float:
        ms = ctypes.c_float()
        begin, end = self._events[2 * side], self._events[2 * side + 1]
        self._do("cuEventElapsedTime", ctypes.byref(ms), begin, end)
        return ms.value

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *error: object) -> None:
        for event in self._events:
            self._do("cuEventDestroy_v2", event)
        for host, there, stream in zip(self._host, self._there, self._streams, strict=True):
            self._do("cuMemFree_v2", there)
            self._do("cuMemFreeHost", host)
            self._do("cuStreamDestroy_v2", stream)
        self._do("cuDevicePrimaryCtxRelease_v2", self._device)
