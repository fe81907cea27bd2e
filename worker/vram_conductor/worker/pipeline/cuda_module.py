"""Kernels: compiled by CuPy, launched through the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from vram_conductor.protocol.errors import FailedPrecondition, Internal
from vram_conductor.worker.pipeline.cuda_call import do
from vram_conductor.worker.pipeline.gpu import Argument, Module, Size, Stream

COMPILE_OPTIONS = ("-std=c++17",)

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES_UNASKED = 48 << 10
"""More dynamic shared memory has to be asked for (CUDA C++ programming guide)."""


class CudaModule(Module):
    """See :class:`vram_conductor.worker.pipeline.gpu.Module`. CuPy keeps what it compiled on disk
    (``CUPY_CACHE_DIR``)."""

    def __init__(self, cupy: Any, source: str) -> None:
        self._driver = cupy.cuda.driver
        self._module = cupy.RawModule(code=source, options=COMPILE_OPTIONS)
        self._functions: dict[str, Any] = {}
        try:
            self._module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise Internal(
                "kernel_compile_failed", f"NVRTC refuses the kernels: {error}; report this"
            ) from None
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
            raise Internal("cuda_failed", f"CUDA refuses the kernels: {error}") from None
        except (RuntimeError, OSError) as error:
            raise FailedPrecondition(
                "nvrtc_missing",
                f"CuPy cannot compile kernels ({error}): install the CUDA toolkit, or its NVRTC "
                "with pip install 'cupy-cuda12x[ctk]' ('cupy-cuda13x[ctk]' for CUDA 13)",
            ) from None

    def prepare(
        self, name: str, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> CudaLaunch:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = do(self._module.get_function, name)
        if shared_bytes > _SHARED_BYTES_UNASKED:
            pointer, wish = function.kernel.ptr, _MAX_DYNAMIC_SHARED
            do(self._driver.funcSetAttribute, pointer, wish, shared_bytes)
        return CudaLaunch(self._driver, function, grid, block, args, shared_bytes)


class CudaLaunch:
    """See :class:`vram_conductor.worker.pipeline.gpu.Launch`."""

    def __init__(
        self,
        driver: Any,
        function: Any,
        grid: Size,
        block: Size,
        args: Sequence[Argument],
        shared_bytes: int,
    ) -> None:
        self._name = function.name
        self._function = function  # keeps the code loaded
        # Each argument in a cell of eight bytes; the driver is given a list of their addresses.
        raw = b"".join(
            value.to_bytes(8, "little") if isinstance(value, int) else value.tobytes().ljust(8)
            for value in args
        )
        self._cells = ctypes.create_string_buffer(raw, max(1, len(raw)))
        start = ctypes.addressof(self._cells)
        pointers = range(start, start + 8 * len(args), 8)
        self._pointers = (ctypes.c_uint64 * len(args))(*pointers)
        size = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
        self._head = (function.kernel.ptr, *size, shared_bytes)
        self._arguments = ctypes.addressof(self._pointers)
        self._call = driver.launchKernel

    def on(self, stream: Stream) -> None:
        try:
            self._call(*self._head, stream.handle, self._arguments, 0)
        except RuntimeError as error:
            raise Internal("cuda_failed", f"CUDA refuses to launch {self._name}: {error}") from None
