"""The GPU of this process, through ggml's own device interface. Any thread."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import MutableMapping

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.llama.binding import shared_object
from vram_conductor.worker.llama.library import library

_GPU = 1
"""``GGML_BACKEND_DEVICE_TYPE_GPU``"""

_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76
"""``CUdevice_attribute``"""

_size_p = ctypes.POINTER(ctypes.c_size_t)

_UNCOUNTABLE = {
    "GGML_CUDA_ENABLE_UNIFIED_MEMORY": "memory that the driver moves has no size to count",
    "GGML_CUDA_GRAPH_OPT": "with several streams a context takes its scratch several times",
}
"""Settings of ggml-cuda under which a context takes what no estimate knows of, and why."""

log = logging.getLogger(__name__)


def drop_uncountable(env: MutableMapping[str, str]) -> None:
    """Remove from the process environment ``env`` what a ledger in bytes cannot live with, and say
    so."""
    for name, why in _UNCOUNTABLE.items():
        if env.pop(name, None) is not None:
            log.warning("%s is ignored: %s", name, why)


class CudaDevice:
    """The first GPU that this process sees: the worker has narrowed them to one.

    Making it creates the CUDA context, which takes about half a gigabyte and stays until the
    process ends: it belongs to ``base``.

    Attributes:
        total_bytes: what the driver says it has.
        sm_count: multiprocessors.
        compute: compute capability, 90 for 9.0.

    Raises:
        FailedPrecondition: ``no_device``: the library sees no GPU, or the driver refuses it.
    """

    def __init__(self) -> None:
        # All modules at once would load all of cuBLAS, half a gigabyte, at its first use.
        os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
        drop_uncountable(os.environ)
        library()
        ggml = shared_object
        ggml.ggml_backend_dev_by_type.argtypes = [ctypes.c_int]
        ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
        ggml.ggml_backend_dev_memory.argtypes = [ctypes.c_void_p, _size_p, _size_p]
        ggml.ggml_backend_dev_memory.restype = None
        self._memory = ggml.ggml_backend_dev_memory
        self._device = ggml.ggml_backend_dev_by_type(_GPU)
        if not self._device:
            problem = library().logs.recent[-1] if library().logs.recent else "no reason given"
            raise FailedPrecondition(
                "no_device",
                f"llama.cpp sees no GPU ({problem}): check CUDA_VISIBLE_DEVICES, and that the "
                "driver is not older than the CUDA version that llama-cpp-python was built for",
            )
        free, total = self._read()
        if total <= 0:
            raise FailedPrecondition(
                "no_device",
                "the GPU is there and CUDA cannot use it: is it in exclusive mode, or lost?",
                free_bytes=free,
                total_bytes=total,
            )
        self.total_bytes = total
        self.sm_count, self.compute = _attributes()

    def used_bytes(self) -> int:
        """What the driver says is in use now, by everybody. Exact to the granule."""
        free, total = self._read()
        return total - free

    def _read(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._memory(self._device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def _attributes() -> tuple[int, int]:
    """(multiprocessors, compute capability) of CUDA's device 0. The context exists."""
    driver = ctypes.CDLL(os.environ.get("VRAM_CONDUCTOR_LIBCUDA", "libcuda.so.1"))
    device = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), 0):
        raise FailedPrecondition("no_device", "the CUDA driver does not tell its device")

    def read(attribute: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return value.value

    return read(_SM_COUNT), 10 * read(_MAJOR) + read(_MINOR)
