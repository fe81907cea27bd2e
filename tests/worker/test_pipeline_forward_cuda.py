"""The forward pass by kernels, on the CPU's stand-in for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu.device import EmulatedCuda
from forward_scenes import LLAMA, TOKENS_ERROR, ForwardScenes, MakeGpu, engine, off

from vram_conductor.worker.pipeline import forward_cuda
from vram_conductor.worker.pipeline.forward import Batch, Capacity


@pytest.fixture
def make_gpu(kernels: Path) -> Iterator[Callable[[], EmulatedCuda]]:
    made: list[EmulatedCuda] = []
    seeds = itertools.count()

    def make() -> EmulatedCuda:
        made.append(EmulatedCuda(kernels, seed=next(seeds)))
        return made[-1]

    yield make
    assert all(gpu.allocated_bytes == 0 for gpu in made)


class TestForward(ForwardScenes):
    def test_prepared_launches_do_not_pile_up(
        self, make_gpu: MakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = 10
        monkeypatch.setattr(forward_cuda, "LAUNCHES_KEPT", kept)
        room = Capacity(n_ctx=32, tokens_max=4)
        with engine(make_gpu, LLAMA, room) as there, engine(None, LLAMA, room) as here:
            for at, tokens in ((0, 3), (3, 1), (4, 2), (6, 3), (9, 1)):
                batch = Batch.of(self.tokens(tokens), at)
                assert off(there.step(batch), here.step(batch)) < TOKENS_ERROR
                forward: Any = there._open().forward
                assert 0 < len(forward._launches) <= kept

    def test_products_of_other_types_are_not_compiled(self, make_gpu: MakeGpu) -> None:
        with engine(make_gpu, LLAMA, Capacity(n_ctx=32, tokens_max=4)) as there:
            forward: Any = there._open().forward
            names = forward._kernels._module._kernels.names
        products = {name for name in names if name.startswith(("matvec", "matmul"))}
        assert products
        assert all("_q4_0" in name for name in products)
