"""The pipeline's streams on a real GPU: right results, and nearly all of the overlap there is."""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import pytest
from stream_rig import PASSES_MAX, Rig

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.worker.bench.rates import copy_rates
from vram_conductor.worker.pipeline.cuda import Cuda
from vram_conductor.worker.pipeline.measure import measure
from vram_conductor.worker.pipeline.synthetic import Synthetic
from vram_conductor.worker.pipeline.synthetic_cuda import SyntheticCuda
from vram_conductor.worker.vram import cuda_ordinal

MIB = 1 << 20
N_UNITS = 16
REPEATS = 7

KERNELS = """
extern "C" __global__ void fill_through_shared(int* out, int value) {
    extern __shared__ int shared[];
    for (int i = threadIdx.x; i < 24000; i += blockDim.x) shared[i] = value + i;
    __syncthreads();
    for (int i = threadIdx.x; i < 24000; i += blockDim.x) out[i] = shared[23999 - i];
}
extern "C" __global__ void nothing(int* out, int value) {}
"""


def tell(figures: str) -> None:
    """For whoever runs this with -s."""
    sys.stdout.write(f"\n{figures}\n")


@pytest.mark.parametrize(("n_units", "slots"), [(1, 1), (3, 2), (5, 2), (7, 3), (9, 4), (2, 4)])
@pytest.mark.parametrize("timed", [False, True])
def test_every_computation_finds_its_own_unit(
    gpu: Cuda, n_units: int, slots: int, timed: bool
) -> None:
    rig = Rig(gpu, n_units, slots, 3 * MIB + 5, timed=timed)
    for _ in range(PASSES_MAX):
        rig.pipeline.run(rig.work)
    rig.pipeline.synchronise()
    assert rig.seen() == [unit + 1 for unit in range(n_units)] * PASSES_MAX
    rig.close()


def test_memory_is_what_was_asked_for_and_comes_back(gpu: Cuda) -> None:
    before = gpu.free_bytes
    memory = gpu.allocate(512 * MIB)
    assert memory.address % 256 == 0
    assert before - gpu.free_bytes == 512 * MIB
    memory.free()
    assert gpu.free_bytes == before


def test_more_than_there_is_is_refused_with_numbers_and_harms_nothing(gpu: Cuda) -> None:
    with pytest.raises(ResourceExhausted) as caught:
        gpu.allocate(2 * gpu.total_bytes)
    assert caught.value.reason == "device_memory_short"
    assert caught.value.details["need_bytes"] == 2 * gpu.total_bytes
    assert 0 < caught.value.details["free_bytes"] <= gpu.total_bytes
    gpu.allocate(MIB).free()


def test_kernels_may_have_more_shared_memory_than_is_usual(gpu: Cuda) -> None:
    stream, memory = gpu.stream(), gpu.allocate(24000 * 4)
    module = gpu.module(KERNELS)
    args = memory.address, np.int32(7)
    module.launch("fill_through_shared", (1,), (256,), args, stream, 24000 * 4)
    found = np.empty(24000, np.int32)
    gpu.copy_to_host(found, memory.address, stream)
    stream.synchronise()
    assert np.array_equal(found, 7 + np.arange(24000)[::-1])
    with pytest.raises(Internal):
        module.launch("fill_through_shared", (1,), (256,), args, stream, 1 << 30)
    with pytest.raises(Internal):
        module.launch("no_such_kernel", (1,), (256,), args, stream)
    memory.free()
    stream.close()


def test_the_compilers_words_are_told(gpu: Cuda) -> None:
    with pytest.raises(Internal, match="no_such_thing") as caught:
        gpu.module('extern "C" __global__ void f() { no_such_thing(); }')
    assert caught.value.reason == "kernel_compile_failed"


def test_a_prepared_launch_costs_microseconds(gpu: Cuda) -> None:
    stream = gpu.stream()
    prepared = gpu.module(KERNELS).prepare("nothing", (1,), (32,), (0, np.int32(0)))
    us: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(300):
            prepared.on(stream)
        us.append((time.perf_counter() - began) / 300 * 1e6)
        stream.synchronise()
    tell(f"{statistics.median(us):.2f} µs per launch")
    assert statistics.median(us) < 10
    stream.close()


def test_pinned_memory_is_copied_at_full_speed(gpu: Cuda, cuda: str) -> None:
    reference = copy_rates(f"cuda:{cuda_ordinal(cuda)}")["h2d_gb_s"]
    n_bytes = 256 * MIB
    began = time.perf_counter()
    pinned = gpu.pinned(4 * n_bytes)
    pinned_s = time.perf_counter() - began
    memory, stream = gpu.allocate(n_bytes), gpu.stream()
    events = gpu.event(timed=True), gpu.event(timed=True)
    rates: list[float] = []
    for turn in range(12):
        start = turn % 4 * n_bytes
        events[0].record(stream)
        gpu.copy_to_device(memory.address, pinned.array[start : start + n_bytes], stream)
        events[1].record(stream)
        stream.synchronise()
        rates.append(n_bytes / events[1].ms_since(events[0]) / 1e6)
    rate = statistics.median(rates)
    tell(f"{rate:.1f} GB/s (reference {reference}); 1 GiB pinned in {pinned_s:.2f} s")
    for item in (*events, stream):
        item.close()
    memory.free()
    pinned.free()
    assert rate > 0.95 * reference


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("iterations", [16, 1500, 3000])
def test_overlap_reaches_97_percent_of_the_bound(gpu: Cuda, slots: int, iterations: int) -> None:
    """Computation takes next to nothing, two thirds of the transfers' time, and more than it."""
    synthetic = SyntheticCuda(gpu, Synthetic(N_UNITS, 32 * MIB, iterations), slots)
    try:
        found = measure(synthetic, N_UNITS, REPEATS)
    finally:
        synthetic.close()
    tell(
        f"{slots} slots, {iterations} iterations: T {found.transfer_ms:.2f} ms, "
        f"C {found.compute_ms:.2f} ms, overlapped {found.overlapped_ms:.2f} ms, "
        f"{found.share:.2%} of {found.bound:.3f}x"
    )
    assert found.share >= 0.97, found.repeats
