"""Tests that need a real GPU: ``pytest -m gpu tests/gpu``. Elsewhere they are skipped, with why.

The seed of everything random is printed in the header (``VRAM_CONDUCTOR_TEST_SEED``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from fault_shim import Fault, loaded_path
from kernel_scenes import KernelBench
from kernel_timing import KernelTimer
from scene import Scene
from vmm_device import cudart

from vram_conductor.client import stage
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import ConductorError, FailedPrecondition
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.pipeline.cuda import Cuda
from vram_conductor.worker.vmm import preload
from vram_conductor.worker.vram import NvmlSampler, cuda_ordinal

HERE = Path(__file__).parent
DEVICE = os.environ.get("VRAM_CONDUCTOR_TEST_DEVICE", "cuda:0")
RUN_S = 120.0

RunPreloaded = Callable[..., subprocess.CompletedProcess[str]]
"""``run(code, *arguments)``: Python code in a process that has the preload library."""


def no_gpu() -> str:
    """Why nothing here can run; empty if it can."""
    try:
        NvmlSampler(DEVICE).close()
    except ConductorError as error:
        return error.info.message
    from vram_conductor.worker.llama.library import library

    if not library().gpu_offload:
        return "this llama-cpp-python was built without CUDA"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and, where there is no GPU, skip: no test of this folder forgets to."""
    own = [item for item in items if HERE in item.path.parents]
    why = no_gpu() if own else ""
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if why:
            item.add_marker(pytest.mark.skip(reason=f"needs {DEVICE}: {why}"))


@pytest.fixture(scope="session")
def cuda() -> str:
    """Id of the device: ``cuda:0``, or ``$VRAM_CONDUCTOR_TEST_DEVICE``."""
    return DEVICE


@pytest.fixture
def used_bytes(cuda: str) -> Iterator[Callable[[], int]]:
    """What NVML says is in use on the device now, by anybody."""
    sampler = NvmlSampler(cuda)
    yield lambda: sampler.sample(0).used_bytes
    sampler.close()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``random_model("0.5B")``: a GGUF of that size with random weights, made once per run."""
    folder = tmp_path_factory.mktemp("random-models")
    return lambda size: make_random(size, folder)


@pytest.fixture(scope="session")
def preload_library() -> Path:
    """The compiled preload library; a host whose memory cannot sleep fails here, saying why."""
    finding = preload.find(os.environ, driver=True)
    if not finding.path:
        pytest.fail(f"device memory cannot sleep here: {finding.why}", pytrace=False)
    return Path(finding.path)


@pytest.fixture
def run_preloaded(preload_library: Path) -> RunPreloaded:
    """Runs code with the preload library, and says what it wrote if it fails."""

    def run(code: str, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        before = os.environ.get("LD_PRELOAD", "")
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "LD_PRELOAD": preload.preload_value(preload_library, before)},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            stdin=subprocess.DEVNULL,
        )
        if ok:
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def cuda_scene(cuda: str, random_model: Callable[[str], Path]) -> Iterator[Callable[..., Scene]]:
    """``cuda_scene(capacity_bytes=…, mode=…)``: a running system on the GPU, with a client."""
    opened: list[Scene] = []

    def start(*, worker: str = "", broker: str = "", **device: int | str) -> Scene:
        folder = str(random_model("tiny-1").parent)
        given = {"capacity_bytes": 0, "host_cap_bytes": 4 << 30, **device}
        stage_device = StageDevice(id=cuda, kind="cuda", **given)  # type: ignore[arg-type]
        scene = Scene(stage_device, worker=f"model_dirs = [{folder!r}]\n{worker}", broker=broker)
        opened.append(scene.__enter__())
        return scene

    yield start
    for scene in reversed(opened):
        scene.__exit__(None, None, None)


@pytest.fixture
def fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str) -> Iterator[Fault]:
    """Every worker of the test looks into one file for what is to fail."""
    shim = Fault(tmp_path, loaded_path("libcuda.so.1"), loaded_path(cudart()))
    before = stage.private_environment

    def environment(env: Mapping[str, str]) -> dict[str, str]:
        return {**before(env), **shim.env}

    monkeypatch.setattr(stage, "private_environment", environment)
    yield shim
    shim.arm("", 0)


@pytest.fixture(scope="session")
def gpu(cuda: str) -> Iterator[Cuda]:
    """The device as the layer pipeline has it; skipped where there is no CuPy."""
    try:
        device = Cuda(cuda_ordinal(cuda))
    except FailedPrecondition as error:
        pytest.skip(error.info.message)
    yield device
    device.close()


@pytest.fixture(scope="session")
def bench(gpu: Cuda) -> Iterator[KernelBench]:
    """Launches kernels and looks at what they write."""
    bench = KernelBench(gpu)
    yield bench
    bench.close()


@pytest.fixture
def timer(gpu: Cuda) -> Iterator[KernelTimer]:
    """Launches kernels and looks at how long they take."""
    timer = KernelTimer(gpu)
    yield timer
    timer.close()
