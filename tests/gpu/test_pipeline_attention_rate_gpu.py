"""How fast attention.cu and its small neighbours are, on memory that lies in no cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from attention_scenes import run
from kernel_scenes import SEED
from kernel_timing import KernelTimer

from vram_conductor.worker.pipeline.attention_plan import (
    AttentionMemory,
    Heads,
    launches,
    plan,
    scratch_bytes,
)
from vram_conductor.worker.pipeline.gpu import Launch
from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.launch_geometry import Geometry, rms_norm, rope, values

CACHES_BYTES = 256 << 20
FILL_BYTES = 512 << 20

EIGHT_B = Heads(32, 8, 128)
GEMMA = Heads(8, 4, 256)
MULTIPROCESSORS = 132
"""Of the device that the limits are meant for (H200); others are given time by their number."""

TOKENS, WIDTH, FF = 512, 4096, 14336
"""Of a prompt in an 8B model."""

FLOOR_MS = 0.02
"""A launch takes so long, whatever it does."""


@pytest.mark.parametrize(
    ("heads", "places", "window", "limit_ms"),
    [
        pytest.param(EIGHT_B, run(0, 0, 512), 0, 0.4, id="512 tokens"),
        pytest.param(EIGHT_B, run(0, 4096, 512), 0, 2.0, id="512 tokens from 4096 on"),
        pytest.param(EIGHT_B, run(0, 8176, 16), 0, 0.4, id="16 tokens from 8176 on"),
        pytest.param(EIGHT_B, [(0, 8191)], 0, 0.3, id="1 token at 8191"),
        pytest.param(EIGHT_B, [(0, 255)], 0, 0.1, id="1 token at 255"),
        pytest.param(EIGHT_B, [(i, 255) for i in range(256)], 0, 0.4, id="256 sequences at 255"),
        pytest.param(EIGHT_B, [(i, 2047) for i in range(32)], 0, 0.6, id="32 sequences at 2047"),
        pytest.param(GEMMA, run(0, 4096, 512), 1024, 1.0, id="gemma, 512 tokens, window 1024"),
        pytest.param(GEMMA, [(0, 8191)], 1024, 0.2, id="gemma, 1 token, window 1024"),
    ],
)
def test_a_layers_attention(
    timer: KernelTimer,
    heads: Heads,
    places: Sequence[tuple[int, int]],
    window: int,
    limit_ms: float,
) -> None:
    gpu = timer.gpu
    sequences, positions = np.array(places, np.int32).T.copy()
    n_ctx, n_sequences = int(positions.max()) + 1, int(sequences.max()) + 1
    kv_bytes = 2 * n_sequences * n_ctx * heads.n_head_kv * heads.head_dim
    shape = len(places), heads.n_head, heads.head_dim
    rng = np.random.default_rng(SEED)
    q = timer.upload(rng.normal(size=shape).astype(np.float32))
    # Random, not zeros: the device is slower where more of its bits change.
    cells = rng.normal(size=kv_bytes // 2).astype(np.float16)
    module = gpu.module(kernel_source("attention.cu", defines=heads.defines))
    parts = plan(positions, sequences, heads, window, gpu.multiprocessors)
    out = timer.memory(4 * int(np.prod(shape)))
    scratch = timer.memory(scratch_bytes(heads, len(places), gpu.multiprocessors))
    at, of = timer.upload(positions), timer.upload(sequences)
    layers = max(2, -(-CACHES_BYTES // (2 * kv_bytes)))
    prepared: list[Launch] = []
    for _ in range(layers):
        k_cache, v_cache = timer.upload(cells), timer.upload(cells)
        memory = AttentionMemory(q, k_cache, v_cache, out, scratch, at, of)
        for launch in launches(parts, heads, memory, n_ctx, heads.head_dim**-0.5, window):
            it = launch.geometry
            prepared.append(module.prepare(launch.kernel, it.grid, it.block, launch.arguments))
    ms = timer.ms(prepared) * len(prepared) / layers
    splits = "/".join(str(part.splits) for part in parts)
    seen = np.minimum(positions + 1, window) if window else positions + 1
    tflops = 4e-9 * heads.n_head * heads.head_dim * int(seen.sum()) / ms
    say(f"attention: {ms * 1e3:.0f} us, {tflops:.1f} TFLOP/s, splits {splits}")
    if gpu.capability >= (8, 0):
        assert ms < limit_ms * max(1, MULTIPROCESSORS / gpu.multiprocessors)


def keeps_up(
    timer: KernelTimer,
    fill: float,
    name: str,
    file: str,
    geometry: Geometry,
    moved: int,
    *arguments: int | np.generic,
) -> None:
    """With memory, more or less.

    Args:
        fill: bytes/s that memory is filled at.
        moved: bytes read and written.
    """
    module = timer.gpu.module(kernel_source(file))
    launch = module.prepare(name, geometry.grid, geometry.block, arguments)
    ms = timer.ms([launch] * 20)
    say(f"  {name}: {ms * 1e3:.1f} us, {moved / ms / 1e6:.0f} GB/s")
    assert ms < FLOOR_MS + moved / (fill / 10) * 1e3


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_what_lies_between_the_products(timer: KernelTimer, tokens: int) -> None:
    fill = timer.fill_bytes_per_s(FILL_BYTES)
    say(f"{tokens} tokens; memory is filled at {fill / 1e9:.0f} GB/s")
    x, up, out = (timer.memory(4 * TOKENS * FF) for _ in range(3))
    cache, weight = timer.memory(2 * TOKENS * WIDTH), timer.memory(4 * WIDTH)
    positions = timer.upload(np.arange(TOKENS, dtype=np.int32))
    sequences = timer.upload(np.zeros(TOKENS, np.int32))
    frequencies = timer.upload(np.full(64, 0.1, np.float32))
    n, one = np.int32(tokens), np.float32(1)
    kv = np.int32(1024)

    check = partial(keeps_up, timer, fill)
    wide, heads = np.int32(WIDTH), np.int32(32)
    check(
        "rms_norm",
        "norm.cu",
        rms_norm(tokens, WIDTH),
        8 * tokens * WIDTH,
        *(x, weight, 0, out, n, wide, np.float32(1e-5)),
    )
    check(
        "rms_norm",
        "norm.cu",
        rms_norm(tokens * 32, 128),
        8 * tokens * WIDTH,
        *(x, weight, 0, out, np.int32(tokens * 32), np.int32(128), np.float32(1e-5)),
    )
    check(
        "rope",
        "rope.cu",
        rope(tokens, 32, 128),
        8 * tokens * WIDTH,
        *(x, positions, frequencies, one, n, heads, np.int32(128), np.int32(128), np.int32(0)),
    )
    check(
        "gated",
        "gated.cu",
        values(tokens * FF),
        12 * tokens * FF,
        *(x, up, out, np.int64(tokens * FF), np.int32(0)),
    )
    check(
        "store_kv",
        "attention.cu",
        values(tokens * int(kv)),
        12 * tokens * int(kv),
        *(x, up, cache, cache, positions, sequences, n, np.int32(TOKENS), kv),
    )


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
