"""A layer engine's memory on a GPU: as announced, refused in time, and given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu.device import EmulatedCuda
from quantised_models import Quantised, make_quantised

from vram_conductor.protocol.errors import ResourceExhausted
from vram_conductor.worker.pipeline.assembly import Plan
from vram_conductor.worker.pipeline.assembly_cuda import assemble_on
from vram_conductor.worker.pipeline.forward import Capacity
from vram_conductor.worker.pipeline.layer_engine import LayerEngine
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.tensor_types import TensorType

CAPACITY = Capacity(n_ctx=64, sequences=2, tokens_max=16, wanted_max=2)


class NoKernels(EmulatedCuda):
    """Compiles nothing."""

    def module(self, source: str) -> Any:
        return None


def plan(n_layer: int = 3, resident: tuple[int, ...] = ()) -> Plan:
    path = make_quantised(Quantised("llama", TensorType.Q4_0, n_layer=n_layer))
    return Plan(ModelFile.open(path), CAPACITY, 2, resident)


@pytest.mark.parametrize("resident", [(), (1,), (0, 1, 2)])
def test_it_takes_what_it_says(tmp_path: Path, resident: tuple[int, ...]) -> None:
    gpu, it = NoKernels(tmp_path), plan(resident=resident)
    with LayerEngine(it, assemble_on(gpu, it)) as engine:
        assert gpu.allocated_bytes == engine.figures.device_bytes
    assert gpu.allocated_bytes == 0


def test_depth_costs_nothing_but_its_cache(tmp_path: Path) -> None:
    taken: list[int] = []
    for n_layer in (1, 6):
        gpu, it = NoKernels(tmp_path), plan(n_layer)
        with LayerEngine(it, assemble_on(gpu, it)) as engine:
            taken.append(gpu.allocated_bytes - engine.figures.kv_bytes)
    assert taken[0] == taken[1]


def test_a_device_that_is_too_small_is_refused_with_all_numbers(tmp_path: Path) -> None:
    it = plan(resident=(1,))
    with LayerEngine(it, assemble_on(NoKernels(tmp_path), it)) as engine:
        need_bytes = engine.figures.device_bytes
    it = plan(resident=(1,))
    LayerEngine(it, assemble_on(NoKernels(tmp_path, total_bytes=need_bytes), it)).close()
    it = plan(resident=(1,))
    gpu = NoKernels(tmp_path, total_bytes=need_bytes - 1)
    with pytest.raises(ResourceExhausted) as caught:
        assemble_on(gpu, it)
    assert caught.value.reason == "device_memory_short"
    told = caught.value.details
    assert told["need_bytes"] == need_bytes
    assert told["free_bytes"] == need_bytes - 1
    parts = ("window_bytes", "resident_bytes", "kv_bytes", "activation_bytes")
    assert sum(told[name] for name in parts) == need_bytes
    assert all(str(told[name]) in caught.value.info.message for name in parts)


@pytest.mark.parametrize("fails_at", range(5))
def test_what_fails_on_the_way_leaves_nothing_behind(tmp_path: Path, fails_at: int) -> None:
    class Failing(NoKernels):
        left = fails_at

        def allocate(self, n_bytes: int) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ResourceExhausted("device_memory_short", "somebody else was faster")
            return super().allocate(n_bytes)

    gpu, it = Failing(tmp_path), plan(resident=(2,))
    with pytest.raises(ResourceExhausted, match="faster"):
        assemble_on(gpu, it)
    gpu.close()
