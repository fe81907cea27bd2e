"""Random register, decode, unregister and lease steps against a tight cap, through all of it."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from gguf_models import Spec, make_model
from scene import MIB, Scene

from vram_conductor.client.bench_bed import Bed
from vram_conductor.client.bench_random import broken, walk
from vram_conductor.client.bench_setting import BenchModel
from vram_conductor.client.probing import estimates
from vram_conductor.client.stage import StageDevice

SEED = int(os.environ.get("VRAM_CONDUCTOR_TEST_SEED") or secrets.randbelow(1 << 32))
STEPS = int(os.environ.get("VRAM_CONDUCTOR_TEST_STEPS") or 1600)
SECONDS = 14.0 * max(1, STEPS // 1600)
N_CTX = 1024
POLL_S = 0.02
SPECS = [Spec(vocab="bytes", seed=seed, n_vocab=2100, n_layer=2) for seed in (60, 61, 62)]
"""The walk's prompts have ids up to 2000."""


@contextmanager
def watched(scene: Scene) -> Generator[list[str]]:
    """Look at the books all the time; what is broken is listed."""
    problems: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_S):
            problems.extend(broken(scene.device()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield problems
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("lanes", ["inline", "threads"])
def test_random_steps_against_a_tight_cap(lanes: str) -> None:
    sys.stdout.write(f"VRAM_CONDUCTOR_TEST_SEED={SEED}\n")
    paths = [make_model(spec) for spec in SPECS]
    sizes = estimates(paths, N_CTX)
    alone = [size["weights_bytes"] + size["pool_bytes"] for size in sizes]
    device = StageDevice(
        capacity_bytes=max(alone) * 3 // 2, host_cap_bytes=256 * MIB, mode="timeshare"
    )
    models = [BenchModel(path.stem, str(path), path.stat().st_size) for path in paths]
    worker = f'sample_ms = 100\nlanes = "{lanes}"'
    with Scene(device, worker=worker) as scene, watched(scene) as problems:
        pid = scene.worker_pid()
        bed = Bed("cpu", scene.stage, scene.conductor)
        found = walk(bed, models, n_ctx=N_CTX, steps=STEPS, seed=SEED, seconds=SECONDS)
        sys.stdout.write(f"{found.steps} steps: {found.counts}\n")
        assert found.problems + bed.complaints() == []
        assert problems == []
        assert scene.worker_pid() == pid
        assert found.steps > STEPS // 10
        # A walk in which nothing happens proves nothing.
        for what in ("register", "collect", "unregister", "lease", "release"):
            assert found.counts.get(what, 0) > 0, found.counts
        end = scene.device()
        assert scene.conductor.list() == []
        assert (end.leases, end.promised.promised_bytes) == ([], 0)
        assert not any(line.key.startswith("lease") for line in end.promised.lines)
