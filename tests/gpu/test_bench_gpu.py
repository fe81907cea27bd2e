"""The worker's part of the benches on a real GPU, and a first life of the whole system."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scene import Scene, some_tokens

from vram_conductor.worker.bench.rates import copy_rates

MIB = 1 << 20


def test_pinned_copies_are_measured_both_ways(cuda: str, used_bytes: Callable[[], int]) -> None:
    rates = copy_rates(cuda, 64 * MIB, 3)
    assert rates["kind"] == "pinned"
    # Any PCIe since 2010; and no bus copies a terabyte per second.
    for side in ("h2d_gb_s", "d2h_gb_s", "both_gb_s"):
        assert 1 < rates[side] < 1000, rates


def test_what_was_measured_with_is_given_back(cuda: str, used_bytes: Callable[[], int]) -> None:
    command = [sys.executable, "-m", "vram_conductor.worker.bench", "rates", "--device", cuda]
    before = used_bytes()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["device"] == cuda
    assert used_bytes() - before < 4 * MIB


def test_the_watcher_sees_what_is_in_use(cuda: str, used_bytes: Callable[[], int]) -> None:
    command = [sys.executable, "-m", "vram_conductor.worker.bench", "memory", "--device", cuda]
    done = subprocess.run(command, capture_output=True, text=True, input="", check=True)
    line = json.loads(done.stdout.splitlines()[0])
    assert abs(line["bytes"] - used_bytes()) < 64 * MIB


def test_a_random_model_answers_on_the_gpu(
    cuda_scene: Callable[..., Scene], random_model: Callable[[str], Path]
) -> None:
    scene = cuda_scene()
    scene.conductor.register("one", str(random_model("0.36B")), n_ctx=2048)
    prompt = some_tokens(200, 1, 49_152)
    first = scene.run("one", prompt, max_tokens=32)
    assert len(first.ids) == 32
    again = scene.run("one", prompt, max_tokens=32, conversation="again")
    assert again.ids == first.ids
    assert first.usage.prompt_tokens == 200
