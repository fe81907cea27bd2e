"""The NVML sampler against a stand-in for ``pynvml`` (with its real error classes)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pynvml
import pytest
from fake_nvml import FakeNvml, process

from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from vram_conductor.worker.vram import NvmlSampler, cuda_ordinal, load_nvml, nvml_target

GIB = 1 << 30


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def test_info_and_capacity_leave_the_drivers_reserve_out(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:1", nvml, {})
    assert sampler.capacity_bytes == 8 * GIB - GIB // 4
    info = sampler.info()
    assert (info.device, info.kind, info.name, info.uuid) == (
        "cuda:1",
        "cuda",
        "Toy 8000",
        "GPU-11aa",
    )
    assert (info.total_bytes, info.reserved_bytes) == (8 * GIB, GIB // 4)
    assert set(nvml.versions) == {pynvml.nvmlMemory_v2}
    sampler.close()
    assert nvml.open == 0


def test_the_drivers_part_beside_our_own_is_ours(nvml: FakeNvml) -> None:
    """Seen on an H200: 527 MiB more in use, 518 of them booked for the process."""
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.used[0] += 527 << 20
    nvml.processes = [process(os.getpid(), 518 << 20)]
    assert sampler.measure_base() == 527 << 20
    nvml.used[0] += GIB
    nvml.processes = [process(os.getpid(), (518 << 20) + GIB)]
    memory = sampler.sample(own_bytes=0)
    assert (memory.own_bytes, memory.foreign_bytes) == ((527 << 20) + GIB, GIB)
    assert sampler.told_bytes == memory.own_bytes


def test_another_program_that_starts_meanwhile_is_not_the_drivers_part(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.used[0] += GIB
    nvml.processes = [process(os.getpid(), 518 << 20), process(1, 500 << 20)]
    assert sampler.measure_base() == 518 << 20


def test_another_machines_process_with_our_id_is_not_we(nvml: FakeNvml) -> None:
    """A container that has process ids of its own, on a host where NVML tells the host's."""
    nvml.processes = [process(os.getpid(), 5 * GIB)]
    nvml.used[0] = 6 * GIB
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.used[0] += 527 << 20
    assert sampler.measure_base() == 527 << 20
    memory = sampler.sample(own_bytes=527 << 20)
    assert memory.foreign_bytes == 6 * GIB
    assert sampler.told_bytes is None


def test_own_use_by_the_process_list(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.processes = [process(1, GIB // 2), process(os.getpid(), 3 * GIB)]
    nvml.used[0] = 4 * GIB
    assert sampler.measure_base() == 3 * GIB
    memory = sampler.sample(own_bytes=1)
    assert (memory.used_bytes, memory.own_bytes, memory.foreign_bytes) == (4 * GIB, 3 * GIB, GIB)


@pytest.mark.parametrize("told", [[], [process(os.getpid(), None)], [process(1, GIB)]])
def test_own_use_by_difference_where_nvml_does_not_tell(
    nvml: FakeNvml, told: list[SimpleNamespace]
) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.processes = told
    nvml.used[0] += 300 << 20
    base = sampler.measure_base()
    assert base == 300 << 20
    nvml.used[0] += 2 * GIB
    memory = sampler.sample(own_bytes=base + 2 * GIB)
    assert memory.own_bytes == 2 * GIB + (300 << 20)
    assert memory.foreign_bytes == GIB


def test_without_permission_for_the_process_list_the_difference_counts(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.fail["nvmlDeviceGetComputeRunningProcesses"] = pynvml.NVML_ERROR_NO_PERMISSION
    assert sampler.sample(own_bytes=GIB // 2).foreign_bytes == GIB // 2


def test_foreign_is_never_negative(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    memory = sampler.sample(own_bytes=5 * GIB)
    assert (memory.own_bytes, memory.foreign_bytes) == (GIB, 0)


@pytest.mark.parametrize(
    ("code", "kind", "reason", "word"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, Unavailable, "no_driver", "kind cpu"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, Unavailable, "no_driver", "--gpus all"),
        (
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            FailedPrecondition,
            "driver_mismatch",
            "reboot",
        ),
        (pynvml.NVML_ERROR_GPU_IS_LOST, Unavailable, "gpu_lost", "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, Unavailable, "nvml_error", "NVML says"),
    ],
)
def test_driver_trouble_is_typed(
    nvml: FakeNvml, code: int, kind: type[ConductorError], reason: str, word: str
) -> None:
    nvml.fail["nvmlInit"] = code
    with pytest.raises(kind, match=word) as caught:
        NvmlSampler("cuda:0", nvml, {})
    assert caught.value.reason == reason


def test_a_gpu_that_is_lost_later_is_typed_too_and_nothing_stays_open(nvml: FakeNvml) -> None:
    sampler = NvmlSampler("cuda:0", nvml, {})
    nvml.fail["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(Unavailable):
        sampler.sample(0)
    sampler.close()
    with pytest.raises(Unavailable):
        NvmlSampler("cuda:0", nvml, {})
    assert nvml.open == 0


def test_an_index_beyond_the_last_gpu(nvml: FakeNvml) -> None:
    with pytest.raises(NotFound, match="2 GPUs") as caught:
        NvmlSampler("cuda:2", nvml, {})
    assert caught.value.details == {"gpus": 2}
    assert nvml.open == 0


def test_visible_devices_are_followed(nvml: FakeNvml) -> None:
    assert NvmlSampler("cuda:0", nvml, {"CUDA_VISIBLE_DEVICES": "1"}).uuid == "GPU-11aa"
    assert NvmlSampler("cuda:1", nvml, {"CUDA_VISIBLE_DEVICES": "1,0"}).uuid == "GPU-00aa"
    assert NvmlSampler("cuda:0", nvml, {"CUDA_VISIBLE_DEVICES": "GPU-11"}).uuid == "GPU-11aa"
    with pytest.raises(Unavailable):
        NvmlSampler("cuda:0", nvml, {"CUDA_VISIBLE_DEVICES": "GPU-ff"})


@pytest.mark.parametrize("visible", ["", "-1", "x,0", "1"])
def test_hidden_gpus(visible: str) -> None:
    with pytest.raises(NotFound, match="CUDA_VISIBLE_DEVICES"):
        nvml_target("cuda:1", {"CUDA_VISIBLE_DEVICES": visible})


def test_device_names() -> None:
    assert cuda_ordinal("cuda") == 0
    assert cuda_ordinal("cuda:12") == 12
    for name in ("cpu", "cuda:x", "cuda:-1", "gpu:0"):
        with pytest.raises(NotFound):
            cuda_ordinal(name)


def test_the_real_module_is_found() -> None:
    assert load_nvml() is pynvml
