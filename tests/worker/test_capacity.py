"""A GPU without NVML: a clear refusal, or the configured capacity."""

from __future__ import annotations

import pynvml
import pytest
from fake_nvml import FakeNvml

from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, NotFound, Unavailable
from vram_conductor.worker import vram
from vram_conductor.worker.capacity import BASE_BYTES_MAX, CapacitySampler, open_gpu
from vram_conductor.worker.vram import NvmlSampler

GIB = 1 << 30


def broken(code: int) -> FakeNvml:
    nvml = FakeNvml()
    nvml.fail["nvmlInit"] = code
    return nvml


def test_nvml_is_preferred() -> None:
    assert isinstance(open_gpu("cuda:1", 4 * GIB, FakeNvml(), {}), NvmlSampler)


def test_without_nvml_and_capacity_nothing_is_served() -> None:
    code = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    with pytest.raises(Unavailable, match="set capacity for cuda:0") as caught:
        open_gpu("cuda:0", 0, broken(code), {})
    assert caught.value.reason == "no_driver"


def test_without_the_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FailedPrecondition("nvml_missing", "GPU devices need nvidia-ml-py")

    monkeypatch.setattr(vram, "load_nvml", missing)
    with pytest.raises(FailedPrecondition, match="set capacity") as caught:
        open_gpu("cuda:0", 0, None, {})
    assert caught.value.reason == "nvml_missing"
    assert isinstance(open_gpu("cuda:0", GIB, None, {}), CapacitySampler)


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_GPU_IS_LOST]
)
def test_a_broken_driver_is_not_worked_around(code: int) -> None:
    with pytest.raises(ConductorError):
        open_gpu("cuda:0", 8 * GIB, broken(code), {})


def test_an_index_beyond_the_last_gpu_is_not_worked_around() -> None:
    with pytest.raises(NotFound):
        open_gpu("cuda:5", 8 * GIB, FakeNvml(), {})
    with pytest.raises(NotFound, match="CUDA_VISIBLE_DEVICES"):
        CapacitySampler("cuda:1", GIB, {"CUDA_VISIBLE_DEVICES": "0"})


def test_the_configured_capacity_is_the_device() -> None:
    sampler = CapacitySampler("cuda:1", 8 * GIB, {"CUDA_VISIBLE_DEVICES": "3,GPU-ab"})
    assert sampler.target == "GPU-ab"
    info = sampler.info()
    assert (info.kind, info.total_bytes, info.reserved_bytes) == ("cuda", 8 * GIB, 0)
    memory = sampler.sample(2 * GIB)
    assert (memory.used_bytes, memory.own_bytes, memory.foreign_bytes) == (2 * GIB, 2 * GIB, 0)
    assert sampler.measure_base() == 0
    assert sampler.told_bytes is None


def test_others_may_use_what_was_not_given_to_us() -> None:
    """24 GiB, 16 of them ours: others' first 8 take nothing from anybody."""
    used = 7 * GIB
    sampler = CapacitySampler("cuda:0", 16 * GIB, {})
    sampler.use(lambda: used, 24 * GIB)
    assert sampler.measure_base() == BASE_BYTES_MAX
    own = GIB
    assert sampler.sample(own).foreign_bytes == 0
    used = 11 * GIB
    memory = sampler.sample(own)
    assert memory.foreign_bytes == 2 * GIB
    assert memory.used_bytes == 3 * GIB
