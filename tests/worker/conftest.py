"""The real engine, once per session; the core's tests, with and without lanes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from core_driver import Driver
from cuda_on_cpu.device import EmulatedCuda
from kernel_scenes import KernelBench

from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine


@pytest.fixture(scope="session")
def engine() -> Iterator[LlamaEngine]:
    """llama.cpp on cpu. One thread: two would wait for each other on a busy machine."""
    engine = open_engine(EngineOptions(threads=1))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelBench]:
    """Kernels, run by the CPU's stand-in for a GPU."""
    bench = KernelBench(EmulatedCuda(tmp_path_factory.mktemp("kernels")), guard_bytes=0)
    yield bench
    bench.close()


ON_LANES = {"test_core_runs", "test_core_swaps", "test_core_cancel", "test_residency"}
"""Modules whose tests must not see a difference."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run them twice."""
    if metafunc.module.__name__.rpartition(".")[2] in ON_LANES:
        metafunc.parametrize("lanes_kind", ["inline", "lockstep"], indirect=True)


@pytest.fixture(autouse=True)
def lanes_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """What every driver of the test uses."""
    before, Driver.lanes_kind = Driver.lanes_kind, getattr(request, "param", "inline")
    yield
    Driver.lanes_kind = before
