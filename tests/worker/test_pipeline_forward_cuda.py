"""The forward pass by kernels, on the CPU's stand-in for a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_on_cpu.device import EmulatedCuda
from forward_scenes import ForwardScenes, MakeGpu


@pytest.fixture
def make_gpu(kernels: Path) -> Iterator[MakeGpu]:
    made: list[EmulatedCuda] = []
    seeds = itertools.count()

    def make() -> EmulatedCuda:
        made.append(EmulatedCuda(kernels, seed=next(seeds)))
        return made[-1]

    yield make
    assert all(gpu.allocated_bytes == 0 for gpu in made)


class TestForward(ForwardScenes):
    pass
