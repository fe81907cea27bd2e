"""Scenes of ``test_residency_gpu.py``, each in a process with the preload library:
``python residency_scenes.py NAME ARGUMENT…``. The last line that a scene prints is its figures.

Here a core drives llama.cpp on the GPU, in this very process, with room for one model out of three.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from core_driver import Attempt, LanesKind
from gguf_models import Spec, make_model
from real_driver import RealDriver

from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.bench.random_models import make_random
from vram_conductor.worker.growth import Growth
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.vram import NvmlSampler

DEVICE = os.environ.get("VRAM_CONDUCTOR_TEST_DEVICE", "cuda:0")
SEED = int(os.environ.get("VRAM_CONDUCTOR_TEST_SEED", "1"))
HOST_BYTES = 8 << 30
LOOK_TURNS = 5
"""A worker that serves looks more often than every so many turns."""

ALIKE = {
    "full": Spec(arch="llama", n_layer=8, n_embd=256, n_ff=16384),
    "window": Spec(arch="gemma3", n_layer=28, n_ff=16384, tied=False),
    "hybrid": Spec(arch="lfm2", n_layer=32, n_ff=16384),
}
"""Of about 360 MiB each, much more than their pools differ by, and than the scratch of two
contexts (115 MiB each on an H200), which a planner may close to have room: where one fits, two do
not. Layers make weights without making scratch."""


class Stage:
    """A GPU, an engine, a store; drivers come and go.

    Attributes:
        base_bytes: what the process has taken before anything was loaded.
    """

    def __init__(self, files: dict[str, Path], n_ctx: int, lanes: str) -> None:
        self.files, self.n_ctx = files, n_ctx
        self.lanes: LanesKind = cast("LanesKind", lanes)
        self.sampler = NvmlSampler(DEVICE)
        os.environ["CUDA_VISIBLE_DEVICES"] = self.sampler.uuid
        self.options = EngineOptions(device_kind="cuda", device_uuid=self.sampler.uuid)
        self.engine = open_engine(self.options)
        assert self.engine.mechanism == "vmm-sleep", self.engine.mechanism_note
        self.base_bytes = self.sampler.measure_base()
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.store = KVStore(ArenaDir(folder / "arenas", DEVICE), HOST_BYTES)

    def used_bytes(self) -> int:
        """By NVML."""
        return self.sampler.sample(0).used_bytes

    def driver(self, *, tight: bool) -> RealDriver:
        """A new core with an agent for each file; ``tight``: room for one of them."""
        driver = RealDriver(
            self.engine,
            self.files,
            store=self.store,
            base_bytes=self.base_bytes,
            budget_bytes=64 << 30,
            batch_tokens=self.options.batch_tokens,
            slice_ms=1,
            lanes=self.lanes,
        )
        for name in self.files:
            driver.load(name, name, n_ctx=self.n_ctx)
        if tight:
            driver.budget(self.room_for_one(driver))
        return driver

    def room_for_one(self, driver: RealDriver) -> int:
        """By what was measured; sleeping contexts keep their scratch. The largest model's weights
        and pool fit, and nothing of another beside them."""
        residency = driver.core.residency
        pools = [pool for pool in residency.pools.values() if pool.handle]
        assert len(pools) == len(self.files), "not everything was opened"
        most = max(pool.weights.bytes + pool.open_bytes for pool in pools)
        return self.base_bytes + most + sum(pool.weights.scratch_bytes for pool in pools)

    def sizes(self, driver: RealDriver) -> dict[str, tuple[int, int, int]]:
        """Weights, pool and scratch of every model, in bytes."""
        pools = {pool.weights.model: pool for pool in driver.core.residency.pools.values()}
        found = {name: pools[driver.identity(name)] for name in self.files}
        return {
            name: (pool.weights.bytes, pool.open_bytes, pool.weights.scratch_bytes)
            for name, pool in found.items()
        }

    def assert_one_at_a_time(self, driver: RealDriver) -> None:
        """Beside a model that is awake there is no room for another one's weights, not even where
        all other contexts were closed, whose scratch the budget counts."""
        sizes = self.sizes(driver)
        room = driver.budget_bytes - self.base_bytes
        for name, own in sizes.items():
            for other, (weights, *_) in sizes.items():
                assert other == name or sum(own) + weights > room, f"{name}, {other}: {sizes}"

    def close(self) -> None:
        self.store.close()
        self.engine.close()
        self.sampler.close()


def turn(driver: RealDriver, agent: str, index: int, n: int = 6) -> Attempt:
    """The conversation goes on with five ids."""
    draw = random.Random(f"{agent} {index}")
    ids = [draw.randrange(8, 300) for _ in range(5)]
    return driver.finish(driver.run(agent, tokens=ids, continue_=True, max_tokens=n))[0]


def warmed(stage: Stage) -> tuple[int, int]:
    """What is in use once every kind of model has computed and is gone again: kernels that were
    loaded stay until the process ends. And how much those took."""
    cold = stage.used_bytes()
    driver = stage.driver(tight=False)
    for index, name in enumerate(stage.files):
        turn(driver, name, index)
    driver.leave()
    warm = stage.used_bytes()
    return warm, warm - cold


class Own:
    """What the process takes for itself, against what a worker promises for it.

    Attributes:
        over_bytes: the most that it took beyond what was promised at the look before.
    """

    def __init__(self, stage: Stage, others_bytes: int, taken_bytes: int) -> None:
        """``taken_bytes``: for kernels, since ``base`` was measured."""
        self._stage, self._others_bytes = stage, others_bytes
        self.growth = Growth(stage.base_bytes, taken_bytes)
        self.over_bytes = -self.growth.reserve_bytes

    def look(self, driver: RealDriver) -> int:
        """Take a sample; what is in use by anybody."""
        used = self._stage.used_bytes()
        counted = driver.core.residency.resident_bytes() - self._stage.base_bytes
        mine = used - self._others_bytes - counted
        self.over_bytes = max(self.over_bytes, mine - self.growth.booked_bytes)
        self.growth = self.growth.grown(mine - self.growth.used_bytes)
        return used


def rates(driver: RealDriver) -> dict[str, Any]:
    """What moves took: count, GB/s."""
    return {
        kind: {"count": item.count, "gb_s": round(item.bytes / item.ms / 1e6, 2), "ms": item.ms}
        for kind, item in driver.core.residency.rates.report().items()
        if item.ms
    }


def tokens(turns: str, lanes: str) -> dict[str, Any]:
    """Random switches between a full, a sliding-window and a hybrid model, to another one with
    each turn; what each says must be what it says when nothing ever moves."""
    stage = Stage({name: make_model(spec) for name, spec in ALIKE.items()}, 2048, lanes)
    draw = random.Random(SEED)
    order = ["full"]
    while len(order) < int(turns):
        order.append(draw.choice([name for name in ALIKE if name != order[-1]]))
    still = stage.driver(tight=False)
    expected = [turn(still, name, index).ids for index, name in enumerate(order)]
    assert still.core.switches == still.core.swaps == 0
    still.leave()
    driver = stage.driver(tight=True)
    stage.assert_one_at_a_time(driver)
    wrong: list[list[object]] = []
    for index, name in enumerate(order):
        attempt = turn(driver, name, index)
        usage = attempt.done.usage
        if attempt.ids != expected[index] or usage.reprefilled_tokens:
            wrong.append([index, name, attempt.ids, expected[index], usage.reprefill_reason])
        resident = driver.core.residency.resident_bytes()
        assert resident <= driver.budget_bytes, (index, resident, driver.budget_bytes)
    found = {"wrong": wrong[:3], "switches": driver.core.switches, "rates": rates(driver)}
    found["variety"] = len({token for ids in expected for token in ids})
    driver.leave()
    stage.close()
    return found


def leak(switches: str, lanes: str, folder: str) -> dict[str, Any]:
    """Switches without end; what NVML says before, between and after. Beside the largest model
    nothing fits, and it comes with every second turn: every turn is a switch."""
    names = ("0.36B", "1.2B", "0.5B", "1.2B")
    files = {name: make_random(name, Path(folder)) for name in names}
    stage = Stage(files, 2048, lanes)
    others = stage.used_bytes() - stage.base_bytes
    start, kernels = warmed(stage)
    own = Own(stage, others, kernels)
    driver = stage.driver(tight=True)
    marks: list[int] = []
    took: list[float] = []
    for index in range(int(switches)):
        name = names[index % len(names)]
        # Conversations are started anew before they are full.
        if index % 200 < len(names):
            driver.forget(name)
        begin = time.perf_counter()
        turn(driver, name, index, n=1)
        took.append((time.perf_counter() - begin) * 1e3)
        if index % LOOK_TURNS == LOOK_TURNS - 1:
            used = own.look(driver)
            marks += [used] if index % 30 == 29 else []
    found = {
        "switches": driver.core.switches,
        "kernels_bytes": kernels,
        "growth_bytes": marks[-1] - marks[0],
        "own_bytes": own.growth.taken_bytes,
        "over_budget_bytes": own.over_bytes,
        "turn_ms": _spread(took[len(took) // 10 :]),
        "rates": rates(driver),
    }
    driver.leave()
    found["left_bytes"] = stage.used_bytes() - start
    found["pinned_left_bytes"] = stage.store.lent_bytes
    stage.close()
    return found


def asleep(lanes: str, folder: str) -> dict[str, Any]:
    """A model that is unloaded in its sleep, and one whose backup goes."""
    names = ("0.36B", "0.5B")
    files = {name: make_random(name, Path(folder)) for name in names}
    stage = Stage(files, 2048, lanes)
    start, kernels = warmed(stage)
    driver = stage.driver(tight=True)
    for index, name in enumerate(names):
        turn(driver, name, index)
    weights = [driver.core.residency.weights[driver.identity(name)] for name in names]
    found: dict[str, Any] = {"asleep": [item.asleep for item in weights], "kernels_bytes": kernels}
    lent = stage.store.lent_bytes
    handle = weights[0].handle
    assert handle is not None
    found["backup_bytes"] = handle.backup_bytes
    driver.unload(names[0])
    found["given_back_bytes"] = lent - stage.store.lent_bytes
    found["weights_bytes"] = weights[0].bytes
    driver.budget(0)
    found["all_asleep_bytes"] = stage.used_bytes() - start
    driver.leave()
    found["left_bytes"] = stage.used_bytes() - start
    stage.close()
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p95": round(ordered[int(len(ordered) * 0.95)], 2),
        "max": round(ordered[-1], 2),
    }


SCENES: dict[str, Callable[..., dict[str, Any]]] = {
    "tokens": tokens,
    "leak": leak,
    "asleep": asleep,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(SCENES[sys.argv[1]](*sys.argv[2:])) + "\n")
