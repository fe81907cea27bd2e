"""The real engine, once per session; the core's tests, with and without lanes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from core_driver import Driver, LanesKind
from cuda_on_cpu.device import EmulatedCuda
from kernel_scenes import KernelBench

from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine


KERNELS_KEPT_S = 7 * 24 * 3600


@pytest.fixture(scope="session")
def engine() -> Iterator[LlamaEngine]:
    """llama.cpp on cpu. One thread: two would wait for each other on a busy machine."""
    engine = open_engine(EngineOptions(threads=1))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels compiled for the CPU are kept, by what they are made of, for later runs, too:
    those of a whole model take the compiler several seconds."""
    # Nobody else may write there: pytest sees to it.
    folder = tmp_path_factory.getbasetemp().parent / "kernels"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            if file.stat().st_mtime < time.time() - KERNELS_KEPT_S:
                file.unlink()
    return folder


@pytest.fixture(scope="session")
def bench(kernels: Path) -> Iterator[KernelBench]:
    """Kernels, run by the CPU's stand-in for a GPU."""
    bench = KernelBench(EmulatedCuda(kernels), guard_bytes=0)
    yield bench
    bench.close()


ON_LANES = {"test_core_runs", "test_core_swaps", "test_core_cancel", "test_residency"}
"""Modules whose tests must not see a difference."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run them twice."""
    module: Any = getattr(metafunc, "module", None)
    if module.__name__.rpartition(".")[2] in ON_LANES:
        metafunc.parametrize("lanes_kind", ["inline", "lockstep"], indirect=True)


@pytest.fixture(autouse=True)
def lanes_kind(request: pytest.FixtureRequest) -> Iterator[None]:
    """What every driver of the test uses."""
    before: LanesKind = Driver.lanes_kind
    wanted: LanesKind = getattr(request, "param", "inline")
    Driver.lanes_kind = wanted
    yield
    Driver.lanes_kind = before
