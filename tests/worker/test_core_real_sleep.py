"""The core, llama.cpp and models that sleep: three of them in turn say what they say alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from core_driver import Attempt, LanesKind
from gguf_models import Spec, make_model
from real_driver import RealDriver
from vmm_books import Books

from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.engine import LlamaEngine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.vmm.library import Vmm

SPECS = {
    "full": Spec(arch="llama"),
    "window": Spec(arch="gemma3", n_layer=7, tied=False),
    "hybrid": Spec(arch="lfm2"),
}
TURNS = 60


@pytest.fixture
def sleepy() -> Iterator[LlamaEngine]:
    engine = open_engine(EngineOptions(threads=1))
    engine._vmm = cast("Vmm", Books())
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    one = KVStore(ArenaDir(tmp_path, "cpu"), 1 << 30)
    yield one
    one.close()


def turn(driver: RealDriver, agent: str, index: int) -> Attempt:
    draw = random.Random(f"{agent} {index}")
    ids = [draw.randrange(8, 300) for _ in range(5)]
    return driver.finish(driver.run(agent, tokens=ids, continue_=True, max_tokens=4))[0]


@pytest.mark.parametrize("lanes", ["inline", "lockstep"])
def test_models_that_sleep_in_turn_say_what_they_say_side_by_side(
    sleepy: LlamaEngine, store: KVStore, lanes: LanesKind
) -> None:
    files = {name: make_model(spec) for name, spec in SPECS.items()}
    draw = random.Random(1)
    order = [draw.choice(list(files)) for _ in range(TURNS)]
    expected: list[list[int]] = []
    for tight in (False, True):
        driver = RealDriver(sleepy, files, store=store, slice_ms=1, lanes=lanes)
        for name in files:
            driver.load(name, name, n_ctx=1024)
        residency = driver.core.residency
        if tight:
            pools = residency.pools.values()
            driver.budget(max(pool.weights.bytes + pool.open_bytes for pool in pools))
        for index, name in enumerate(order):
            attempt = turn(driver, name, index)
            assert attempt.done.usage.reprefilled_tokens == 0
            assert residency.resident_bytes() <= driver.budget_bytes
            if tight:
                assert attempt.ids == expected[index]
            else:
                expected.append(attempt.ids)
        found = residency.rates.report()
        assert found["load"].count == found["open_pool"].count == len(files)
        assert ("wake_weights" in found) == tight
        assert (driver.core.switches > TURNS // 3) == tight
        driver.leave()
    assert len({token for ids in expected for token in ids}) > 20
    assert store.lent_bytes == 0
