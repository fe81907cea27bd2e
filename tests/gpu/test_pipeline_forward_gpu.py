"""The forward pass on a real GPU: right, within its memory, and as fast as its layers come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forward_scenes import ForwardScenes, MakeGpu
from quantised_models import Quantised, make_quantised

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.bench.rates import copy_rates
from vram_conductor.worker.pipeline.assembly import Plan
from vram_conductor.worker.pipeline.assembly_cuda import assemble_on
from vram_conductor.worker.pipeline.cuda import Cuda
from vram_conductor.worker.pipeline.forward import Batch, Capacity
from vram_conductor.worker.pipeline.layer_engine import LayerEngine
from vram_conductor.worker.pipeline.model_file import ModelFile
from vram_conductor.worker.pipeline.tensor_types import TensorType
from vram_conductor.worker.vram import NvmlSampler, cuda_ordinal

MIB = 1 << 20
GRANULE_BYTES = 2 * MIB
"""Of ``cudaMalloc``: every allocation may take so much more than it says."""

LARGE = Quantised(
    "llama",
    TensorType.Q4_0,
    n_vocab=32_000,
    n_layer=8,
    n_embd=4096,
    n_head=32,
    n_head_kv=8,
    head_dim=128,
    n_ff=14_336,
    n_ctx_train=4096,
)
"""Layers of an 8B model, a quarter of them."""


@pytest.fixture
def make_gpu(cuda: str) -> MakeGpu:
    def make() -> Cuda:
        try:
            return Cuda(cuda_ordinal(cuda))
        except FailedPrecondition as error:
            pytest.skip(error.info.message)

    return make


class TestForward(ForwardScenes):
    pass


def tell(figures: str) -> None:
    """For whoever runs this with -s."""
    sys.stdout.write(f"\n{figures}\n")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_quantised(LARGE, tmp_path_factory.mktemp("large"))


@pytest.fixture
def engine(make_gpu: MakeGpu, large: Path) -> Iterator[LayerEngine]:
    capacity = Capacity(n_ctx=1024, sequences=64, tokens_max=512, wanted_max=64)
    plan = Plan(ModelFile.open(large), capacity, 2, (), timed=True)
    with LayerEngine(plan, assemble_on(make_gpu(), plan)) as it:
        yield it


def decode_ms(engine: LayerEngine, sequences: int, steps: int = 12) -> float:
    """Of one token in each sequence, the best of the one before, in a row of steps."""
    engine.reset()
    of = np.arange(sequences, dtype=np.int32)
    tokens = of
    began = 0.0
    for step in range(-2, steps):
        if step == 0:
            began = time.perf_counter()
        batch = Batch.of(tokens, np.full(sequences, step + 2), of, wanted=of)
        tokens = engine.step_best(batch)
    return (time.perf_counter() - began) / steps * 1e3


def test_memory_is_what_it_says_whatever_the_depth(
    make_gpu: MakeGpu, cuda: str, tmp_path: Path
) -> None:
    sampler = NvmlSampler(cuda)
    capacity = Capacity(n_ctx=1024, tokens_max=64)
    batch = Batch.of(np.arange(64), 0)
    taken: list[int] = []
    for n_layer in (2, 2, 20):
        spec = Quantised(
            "llama",
            TensorType.Q8_0,
            n_layer=n_layer,
            n_embd=2048,
            n_ff=4096,
            n_head=32,
            n_head_kv=2,
        )
        plan = Plan(ModelFile.open(make_quantised(spec, tmp_path)), capacity, 2)
        gpu = make_gpu()
        before = sampler.sample(0).used_bytes
        with LayerEngine(plan, assemble_on(gpu, plan)) as it:
            it.step(batch)
            it.step(Batch.of([1], 64))
            used = sampler.sample(0).used_bytes - before
            allocations = 2 + 2  # slots, activations, cache
            room = it.figures.device_bytes + allocations * GRANULE_BYTES
            tell(f"{n_layer} layers: NVML {used}, by our account {it.figures.device_bytes}")
            taken.append(used - it.figures.kv_bytes)
            if len(taken) > 1:  # the first one loaded the kernels, which stay
                assert used <= room
    assert abs(taken[2] - taken[1]) <= GRANULE_BYTES
    sampler.close()


def test_decoding_goes_as_fast_as_the_layers_come(engine: LayerEngine, cuda: str) -> None:
    ideal_ms = engine.figures.streamed_bytes / copy_rates(cuda)["h2d_gb_s"] / 1e6
    rates = {}
    for sequences in (1, 8, 64):
        ms = decode_ms(engine, sequences)
        engine.spans()
        rates[sequences] = sequences / ms * 1e3
        tell(
            f"{sequences} sequences: {ms:.2f} ms per step, {ideal_ms / ms:.1%} of the bus, "
            f"{rates[sequences]:.0f} tokens/s"
        )
        if sequences == 1:
            assert ideal_ms / ms >= 0.85
    assert rates[8] > 6 * rates[1]
    assert rates[64] > 4 * rates[8]


def test_a_prompt_overlaps_with_the_layers(engine: LayerEngine) -> None:
    prompt = Batch.of(np.arange(512) % 32_000, 0)
    times: dict[str, list[float]] = {"overlapped": [], "serial": []}
    for _ in range(5):
        for name, step in (("overlapped", engine.step), ("serial", engine.step_serial)):
            engine.reset()
            engine.spans()
            if name == "overlapped":
                step(prompt)  # what is ahead is ahead of the next, too
                engine.reset()
            began = time.perf_counter()
            step(prompt)
            times[name].append((time.perf_counter() - began) * 1e3)
            if name == "serial":
                spans = engine.spans()
    overlapped_ms, serial_ms = (float(np.median(found)) for found in times.values())
    sums = {
        kind: sum(span.ms for span in spans if span.stream == kind)
        for kind in ("transfer", "compute")
    }
    tell(
        f"512 tokens: serial {serial_ms:.1f} ms, overlapped {overlapped_ms:.1f} ms, "
        f"T {sums['transfer']:.1f} ms, C {sums['compute']:.1f} ms"
    )
    assert serial_ms / overlapped_ms >= 1.4


def test_launching_a_layer_takes_less_time_than_its_transfer(engine: LayerEngine) -> None:
    decode_ms(engine, 1)
    engine.spans()
    engine.step_serial(Batch.of([1], 3))
    spans = engine.spans()
    layers = [span.ms for span in spans if span.stream == "compute" and span.unit < 8]
    transfers = [span.ms for span in spans if span.stream == "transfer" and span.unit < 8]
    tell(f"one token: layer {np.median(layers):.3f} ms, transfer {np.median(transfers):.3f} ms")
    assert np.median(layers) < np.median(transfers)
