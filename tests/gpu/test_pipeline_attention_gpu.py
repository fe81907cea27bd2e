"""Attention, norms, rotation and gate on a real GPU: the scenes of tests/worker, and real sizes."""

from __future__ import annotations

import pytest
from attention_scenes import AttentionScenes, Case, MmaScenes, StoreScenes, run
from kernel_scenes import KernelBench
from layer_scenes import GatedScenes, NormScenes, RopeScenes

from vram_conductor.worker.pipeline.attention_plan import Heads, plan

EIGHT_B = Heads(32, 8, 128)
GEMMA = Heads(8, 4, 256)

PROMPT = run(0, 0, 512)
LATER = run(1, 3000, 300)
LONG = [(0, 8191)]
DECODING = [(i, 100 + i) for i in range(256)]
MIXED = [(5, 2000), *run(0, 64, 200), *run(1, 1500, 77), (2, 0), (3, 900)]


class TestMma(MmaScenes):
    pass


class TestStore(StoreScenes):
    pass


class TestNorm(NormScenes):
    pass


class TestRope(RopeScenes):
    pass


class TestGated(GatedScenes):
    pass


class TestAttention(AttentionScenes):
    @pytest.mark.parametrize("heads", [EIGHT_B, GEMMA], ids=["8B", "gemma"])
    @pytest.mark.parametrize("window", [0, 512])
    @pytest.mark.parametrize(
        "places",
        [PROMPT, LATER, LONG, DECODING, MIXED],
        ids=["prompt", "later", "long", "decoding", "mixed"],
    )
    def test_a_real_layer(
        self, bench: KernelBench, heads: Heads, window: int, places: list[tuple[int, int]]
    ) -> None:
        case = Case(heads, places, window)
        multiprocessors = bench.gpu.multiprocessors
        parts = plan(case.positions, case.sequences, heads, window, multiprocessors)
        case.check(bench, parts)
