"""Two GPUs in one configuration: each is measured by itself, and a full one is merely full."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scene import Scene, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.vram import NvmlSampler

MIB, GIB = 1 << 20, 1 << 30
HOST_CAP = 2 * GIB
N_VOCAB = 49_152
SPARE = 300 * MIB
"""Left on the full GPU: too little for a model and its pool."""

HOG = """
import sys
import cupy
cupy.cuda.Device(int(sys.argv[1])).use()
taken = cupy.cuda.alloc(int(sys.argv[2]))
print("taken", flush=True)
sys.stdin.read()
"""


def second() -> str:
    """Why there is no second GPU; empty if there is one."""
    try:
        NvmlSampler("cuda:1").close()
    except ConductorError as error:
        return error.info.message
    return ""


pytestmark = pytest.mark.skipif(bool(second()), reason=f"needs cuda:1: {second()}")


@pytest.fixture
def pair() -> Iterator[Scene]:
    """Workers on both."""
    devices = [StageDevice(f"cuda:{at}", 0, HOST_CAP, kind="cuda") for at in range(2)]
    with Scene(*devices, worker="sample_ms = 200") as scene:
        for device in devices:
            scene.worker_pid(device.id)
        yield scene


@contextmanager
def hog(at: int, size: int) -> Generator[None]:
    """Another program has so much of the GPU."""
    command = [sys.executable, "-c", HOG, str(at), str(size)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline().strip() == "taken"
            yield
        finally:
            other.kill()


def used_bytes(device: str) -> int:
    sampler = NvmlSampler(device)
    try:
        return sampler.sample(0).used_bytes
    finally:
        sampler.close()


def test_each_worker_is_on_its_own_gpu(pair: Scene, random_model: Callable[[str], Path]) -> None:
    before = [used_bytes(f"cuda:{at}") for at in range(2)]
    for at in (1, 0):
        pair.conductor.register(f"a{at}", str(random_model("0.36B")), device=f"cuda:{at}")
        pair.run(f"a{at}", some_tokens(50, at, N_VOCAB), max_tokens=4)
        grown = [used_bytes(f"cuda:{n}") - before[n] for n in range(2)]
        assert grown[at] > 150 * MIB
        assert grown[1 - at] < 50 * MIB or at == 0


def test_a_full_gpu_is_merely_full(pair: Scene, random_model: Callable[[str], Path]) -> None:
    """What another program has of one is not handed out; agents go to the other."""
    memory = pair.device("cuda:0").promised
    room = memory.cap_bytes - memory.promised_bytes
    with hog(0, room - SPARE):
        until(lambda: pair.device("cuda:0").budget_bytes < 2 * SPARE + GIB, "it is noticed")
        assert pair.device("cuda:1").foreign_bytes < GIB
        for at in range(2):
            info = pair.conductor.register(f"a{at}", str(random_model("1.2B")), n_ctx=8192).info
            assert info is not None
            assert pair.agent(f"a{at}").device == "cuda:1"
        pair.run("a0", some_tokens(50, 1, N_VOCAB), max_tokens=4)
    until(lambda: pair.device("cuda:0").foreign_bytes < GIB, "it is free again")
