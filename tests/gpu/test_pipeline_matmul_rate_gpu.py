"""How fast ``kernels/matmul.cu`` is: on weights that lie in device memory and in no cache."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_timing import KernelTimer
from matmul_rig import MatmulRig

from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.matmul_geometry import TILE_ROWS, tile_tokens, with_tile
from vram_conductor.worker.pipeline.tensor_types import TensorType

FILL_BYTES = 512 << 20

KINDS = (TensorType.Q4_0, TensorType.Q4_K, TensorType.Q8_0, TensorType.Q6_K)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
every_shape = pytest.mark.parametrize(("rows", "columns"), [(4096, 14336), (14336, 4096)])


@pytest.fixture
def mma_tflops(timer: KernelTimer) -> float:
    """What the tensor cores do when nothing keeps them waiting."""
    if timer.gpu.capability < (8, 0):
        pytest.skip("no tensor cores for this kernel")
    text = Path(__file__).parents[1].joinpath("mma_rate.cu").read_text()
    blocks, rounds = 2 * timer.gpu.multiprocessors, 4096
    module = timer.gpu.module(kernel_source("mma.cu") + text)
    out = timer.memory(4 * 256 * blocks)
    launch = module.prepare("mma_only", (blocks,), (256,), [out, np.int32(rounds)])
    return 2e-9 * 16 * 8 * 16 * 16 * 8 * blocks * rounds / timer.ms([launch] * 4)


@every_kind
@every_shape
def test_many_tokens_keep_the_tensor_cores_busy(
    timer: KernelTimer, mma_tflops: float, kind: TensorType, rows: int, columns: int
) -> None:
    rig = MatmulRig(timer, kind, rows, columns)
    say(f"{kind.name} {rows} x {columns}; tensor cores alone {mma_tflops:.0f} TFLOP/s")
    shares = {}
    for tokens in (16, 64, 128, 512):
        ms = rig.ms(tokens)
        tflops = rig.tflops(tokens, ms)
        shares[tokens] = tflops / mma_tflops
        say(f"  {tokens} tokens: {ms * 1e3:.0f} us, {tflops:.0f} TFLOP/s, {shares[tokens]:.0%}")
    say(f"  to_half of 512 tokens: {rig.to_half_ms(512) * 1e3:.0f} us")
    assert shares[512] > 0.2
    assert shares[128] > 0.1


@every_kind
@every_shape
def test_few_tokens_read_weights_far_faster_than_they_come(
    timer: KernelTimer, kind: TensorType, rows: int, columns: int
) -> None:
    rig = MatmulRig(timer, kind, rows, columns)
    fill = timer.fill_bytes_per_s(FILL_BYTES)
    say(f"{kind.name} {rows} x {columns}; memory is filled at {fill / 1e9:.0f} GB/s")
    for tokens in (2, 4, 8, 12, 16, 32, 64):
        ms = rig.ms(tokens)
        rate = rig.n_bytes / ms * 1e3
        say(f"  {tokens} tokens: {ms * 1e3:.0f} us, {rate / 1e9:.0f} GB/s of weights")
        assert rate > fill / 12


@pytest.mark.parametrize("rows", [1024, 4096, 14336])
def test_the_tile_is_chosen_well(timer: KernelTimer, rows: int) -> None:
    rig = MatmulRig(timer, TensorType.Q4_K, rows, 4096)
    for tokens in (2, 8, 16, 24, 32, 64, 128, 256, 512):
        chosen = tile_tokens(rows, tokens, timer.gpu.multiprocessors)
        ms = {
            tile: rig.ms(tokens, with_tile(tile, rig.kind, rows, tokens, rig.cores))
            for tile in TILE_ROWS
        }
        times = ", ".join(f"{tile}: {time * 1e3:.0f}" for tile, time in ms.items())
        say(f"{rows} rows, {tokens} tokens: chosen {chosen} of (us) {times}")
        assert ms[chosen] < 1.6 * min(ms.values())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
