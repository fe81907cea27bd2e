"""The first look at a GPU, on the cpu with a stand-in for the device's own word."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from gguf_models import Arch, Spec, make_model
from vmm_books import Books

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama import dryrun
from vram_conductor.worker.llama.calibration import (
    CUBLAS_BYTES,
    SHAPES,
    UNEVEN,
    WIDE,
    calibrate,
)
from vram_conductor.worker.llama.context import create_context
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.pool import LlamaPool
from vram_conductor.worker.llama.samples import F16, Sample, write_sample
from vram_conductor.worker.llama.scratch import Gpu
from vram_conductor.worker.llama.tensors import read_tensors
from vram_conductor.worker.vmm.library import Vmm

MIB = 1 << 20
OPTIONS = EngineOptions(n_ubatch=512, threads=1)


@dataclass
class Told:
    """A device that tells what it was told to."""

    readings: list[int]
    sm_count: int = 132
    compute: int = 90

    def used_bytes(self) -> int:
        return self.readings.pop(0)


def readings(beyond: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Before and after each closing; the buffers themselves are seen as nothing."""
    monkeypatch.setattr(LlamaModel, "open_pool", _open_empty)
    return [MIB, 0] * (4 + len(SHAPES)) + [beyond, 0]


def _open_empty(model: LlamaModel, shape: PoolShape) -> LlamaPool:
    pool = LlamaPool(model._model, model.info, model._options, shape)
    pool.measured_bytes = 0
    return pool


def test_what_a_plain_context_gives_back_is_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Told(readings(98 * MIB, monkeypatch))
    assert calibrate(device, OPTIONS) == Gpu(132, 90, 98 * MIB)
    assert not device.readings


def test_sleeping_and_waking_are_tried_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books()
    moves: list[str] = []

    def note(name: str) -> None:
        inner = getattr(books, name)

        def noted(*arguments: Any) -> None:
            moves.append(name)
            inner(*arguments)

        monkeypatch.setattr(books, name, noted)

    for name in ("back_up", "sleep", "wake"):
        note(name)
    device = Told(readings(98 * MIB, monkeypatch))
    monkeypatch.setattr(LlamaModel, "open_pool", _open_sleepy)
    assert calibrate(device, OPTIONS, cast("Vmm", books)).cublas_bytes == 98 * MIB
    assert moves == ["back_up", "sleep", "sleep", "wake", "wake"]
    assert not caplog.records


def test_a_device_that_cannot_wake_is_calibrated_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    books = Books()

    def refuse(tag: int) -> None:
        raise ResourceExhausted("wake_failed", "others have taken it", retryable=True)

    monkeypatch.setattr(books, "wake", refuse)
    device = Told(readings(98 * MIB, monkeypatch))
    monkeypatch.setattr(LlamaModel, "open_pool", _open_sleepy)
    assert calibrate(device, OPTIONS, cast("Vmm", books)).cublas_bytes == 98 * MIB
    assert "others have taken it" in caplog.text


def _open_sleepy(model: LlamaModel, shape: PoolShape) -> LlamaPool:
    pool = LlamaPool(model._model, model.info, model._options, shape, model._vmm)
    pool.measured_bytes = 0
    return pool


@pytest.mark.parametrize("beyond", [-3 << 30, 0, 3 << 30])
def test_nonsense_is_not_believed(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program took or gave back gigabytes in between."""
    assert calibrate(Told(readings(beyond, monkeypatch)), OPTIONS).cublas_bytes == CUBLAS_BYTES


@pytest.mark.parametrize("sample", [*SHAPES, UNEVEN, WIDE, Sample(), Sample(kind=F16)])
def test_the_samples_are_models(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "sample.gguf"
    write_sample(path, sample)
    assert path.stat().st_size < 4 * MIB
    kinds = {tensor.kind for tensor in read_tensors(str(path))}
    assert kinds == ({0, 1} if sample.kind else {0, 2, 8, 12, 14})
    model = LlamaModel(str(path), path.name, OPTIONS)
    pool = model.open_pool(PoolShape(1024, 1))
    pool.warm_up()
    assert pool.pos_max(0) == -1
    pool.warm_up()
    pool.close()
    model.close()


@pytest.mark.parametrize("shape", [PoolShape(256, 1), PoolShape(768, 3, "q8_0")])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "jamba", "lfm2"])
def test_a_warmed_pool_is_as_empty_as_a_new_one(arch: Arch, shape: PoolShape) -> None:
    if arch in ("mamba", "jamba") and shape.kv_type != "f16":
        pytest.skip("their caches are not quantised")
    model = LlamaModel(str(make_model(Spec(arch=arch))), arch, OPTIONS)
    pool = model.open_pool(shape)
    pool.warm_up()
    for slot in range(shape.slots):
        assert pool.pos_max(slot) == -1
        assert pool.state_bytes(slot) == 0
    pool.close()
    model.close()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "jamba", "lfm2"])
def test_a_dry_run_tells_the_scratch_of_a_gpu(arch: Arch) -> None:
    """Their matrices are f32: cuBLAS multiplies them."""
    gpu = Gpu(132, 90, 98 * MIB)
    path = str(make_model(Spec(arch=arch)))
    shape = PoolShape(512, 2)
    with_gpu, without = DryRunner(OPTIONS, gpu), DryRunner(OPTIONS)
    try:
        told = with_gpu.estimate(path, "m", shape, 256, None).scratch_bytes
        assert gpu.cublas_bytes < told < gpu.cublas_bytes + 16 * MIB
        assert without.estimate(path, "m", shape, 256, None).scratch_bytes == 0
    finally:
        with_gpu.close()
        without.close()


@pytest.mark.parametrize("slots", [3, 8, 16])
@pytest.mark.parametrize("arch", ["mamba", "jamba", "lfm2"])
def test_slots_of_recurrent_models_are_scaled_and_not_allocated(arch: Arch, slots: int) -> None:
    """A dry run would really allocate their caches, on a GPU out of what others were promised."""
    path = str(make_model(Spec(arch=arch)))
    scaled, tried = DryRunner(OPTIONS, Gpu(132, 90, 98 * MIB)), DryRunner(OPTIONS)
    try:
        for cells in (256, 4096):
            shape = PoolShape(cells, slots)
            found = scaled.estimate(path, "m", shape, 256, None)
            real = tried.estimate(path, "m", shape, 256, None)
            assert found.weights_bytes == real.weights_bytes
            assert found.kv_bytes == real.kv_bytes
            assert 0 <= found.recurrent_bytes - real.recurrent_bytes < slots * 11_000
            assert 0 <= found.compute_bytes - real.compute_bytes < slots * 300_000
            assert found.state_bytes >= real.state_bytes
    finally:
        scaled.close()
        tried.close()


class OnHost:
    """Only what a dry run needs of ``Vmm``."""

    def __init__(self) -> None:
        self.now, self.entered = False, 0

    @contextmanager
    def on_host(self) -> Generator[None]:
        assert not self.now
        self.now, self.entered = True, self.entered + 1
        yield
        self.now = False


def test_dry_contexts_are_made_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    vmm = OnHost()
    made: list[bool] = []

    def create(*arguments: Any) -> Any:
        made.append(vmm.now)
        return create_context(*arguments)

    monkeypatch.setattr(dryrun, "create_context", create)
    runner = DryRunner(OPTIONS, Gpu(132, 90, 98 * MIB), cast("Vmm", vmm))
    try:
        runner.estimate(str(make_model(Spec(arch="jamba"))), "m", PoolShape(512, 4), 256, None)
    finally:
        runner.close()
    assert vmm.entered == len(made) >= 2
    assert all(made)
    assert not vmm.now
