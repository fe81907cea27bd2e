"""What can be said of the CUDA wrapper without a GPU: its refusals, its memory, its arguments."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_nvml import FakeNvml

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    Internal,
    NotFound,
    ResourceExhausted,
)
from vram_conductor.worker.memory import host_memory
from vram_conductor.worker.pipeline.cuda import Cuda, CudaPinned
from vram_conductor.worker.pipeline.cuda_module import CudaLaunch
from vram_conductor.worker.pipeline.gpu import Argument
from vram_conductor.worker.pipeline.host_region import host_region


def test_cupy_that_is_not_installed_names_both_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(FailedPrecondition) as caught:
        Cuda.of("cuda:0")
    assert caught.value.reason == "cupy_missing"
    assert "[cuda]" in caught.value.info.message
    assert "[cuda13]" in caught.value.info.message


def test_a_process_uses_one_gpu_as_often_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one, CUDA is told before it begins; then every other number means something else."""
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDeviceCount=lambda: 1,
        setDevice=lambda ordinal: None,
        free=lambda address: None,
        getDeviceProperties=lambda ordinal: {
            "name": b"Toy 8000",
            "major": 6,
            "minor": 1,
            "multiProcessorCount": 20,
        },
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(Cuda, "_chosen", None)
    for _ in range(2):
        assert Cuda.of("cuda:1").name == "Toy 8000"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-11aa"
    for other in ("cuda:0", "cuda"):
        with pytest.raises(FailedPrecondition) as caught:
            Cuda.of(other)
        assert caught.value.reason == "cuda_in_use"
        assert "chose cuda:1" in caught.value.info.message
    with pytest.raises(NotFound):
        Cuda.of("cuda:x")


@pytest.mark.parametrize("n_bytes", [0, 1, 4096, 4097, 3_000_001])
def test_a_host_region_is_all_zeros_at_a_page(n_bytes: int) -> None:
    array = host_region(n_bytes)
    assert array.shape == (n_bytes,)
    assert not array.any()
    assert array.ctypes.data % mmap.PAGESIZE == 0
    array[:] = 7
    assert (array == 7).all()


def test_more_host_memory_than_there_is_is_refused_with_numbers() -> None:
    need_bytes = host_memory().total_bytes + 1
    with pytest.raises(ResourceExhausted) as caught:
        host_region(need_bytes)
    assert caught.value.reason == "host_memory_short"
    assert caught.value.details["need_bytes"] == need_bytes
    assert caught.value.details["available_bytes"] < need_bytes


class Runtime:
    """Registers host memory, and says what of it was still mapped when it was given back."""

    def __init__(self) -> None:
        self.mapped: dict[int, bool] = {}

    def register(self, address: int, n_bytes: int, flags: int) -> None:
        self.mapped[address] = False

    def unregister(self, address: int) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        ranges = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
        self.mapped[address] = any(start <= address < end for start, end in ranges)


def test_pinned_memory_is_unregistered_before_it_is_unmapped() -> None:
    runtime = Runtime()
    calls: Any = SimpleNamespace(
        hostRegister=runtime.register,
        hostUnregister=runtime.unregister,
        CUDARuntimeError=RuntimeError,
    )
    pinned = CudaPinned(calls, 5 << 20)
    assert list(runtime.mapped.values()) == [False]
    pinned.free()
    assert list(runtime.mapped.values()) == [True]
    assert not pinned.array.size


def value_at(address: Any, kind: type[Any]) -> Any:
    return ctypes.cast(address, ctypes.POINTER(kind)).contents.value


class Driver:
    """Takes what a launch is given apart, as CUDA would: by the parameters' types."""

    def __init__(self, *types: Any, error: str = "") -> None:
        self._types = types
        self._error = error
        self.calls: list[Any] = []

    def launch_kernel(self, *given: int) -> None:
        if self._error:
            raise RuntimeError(self._error)
        *head, arguments, extra = given
        pointers = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        values = [value_at(pointers[index], kind) for index, kind in enumerate(self._types)]
        self.calls.append((tuple(head), values, extra))


def launch(driver: Driver, args: list[Argument]) -> CudaLaunch:
    function = SimpleNamespace(name="kernel", kernel=SimpleNamespace(ptr=77))
    calls = SimpleNamespace(launchKernel=driver.launch_kernel)
    return CudaLaunch(calls, function, (3, 2), (64,), args, 512)


def test_arguments_lie_where_the_driver_looks_for_them() -> None:
    driver = Driver(ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_int64, ctypes.c_uint8)
    address = 0xFEDC_BA98_7654_3210
    prepared = launch(
        driver, [address, np.int32(-5), np.float32(0.1), np.int64(-(2**40)), np.uint8(200)]
    )
    stream: Any = SimpleNamespace(handle=9)
    for _ in range(2):
        prepared.on(stream)
    head = (77, 3, 2, 1, 64, 1, 1, 512, 9)
    values = [address, -5, float(np.float32(0.1)), -(2**40), 200]
    assert driver.calls == [(head, values, 0)] * 2


def stream() -> Any:
    """Of which a launch wants the handle alone."""
    return SimpleNamespace(handle=1)


def test_a_kernel_without_parameters_can_be_launched() -> None:
    driver = Driver()
    launch(driver, []).on(stream())
    assert driver.calls[0][1] == []


def test_a_refused_launch_names_the_kernel() -> None:
    refused = launch(Driver(error="CUDA_ERROR_ILLEGAL_ADDRESS"), [])
    with pytest.raises(Internal, match="kernel: CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        refused.on(stream())
    assert caught.value.reason == "cuda_failed"
