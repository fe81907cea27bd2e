"""llama.cpp on lanes: models that compute side by side, and beside moves, say what they say alone.

Random lives of the fake engine prove more; this proves that llama.cpp can take it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from core_driver import LanesKind
from gguf_models import Spec, make_model
from real_driver import BUDGET, RealDriver

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

SPECS = {
    "anna": Spec(arch="llama"),
    "bert": Spec(arch="gemma3", n_layer=7, tied=False),
    "carl": Spec(arch="mamba"),
}
IDS = {name: [8 + (index * 31 + 7 * ord(name[0])) % 300 for index in range(40)] for name in SPECS}
NO_END = [(token, -1000.0) for token in range(5)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    one = KVStore(ArenaDir(tmp_path, "cpu"), 1 << 30)
    yield one
    one.close()


@pytest.fixture
def files() -> dict[str, Path]:
    return {name: make_model(spec) for name, spec in SPECS.items()}


def say(driver: RealDriver, name: str, index: int) -> int:
    """One turn of an agent that is called after its model, or another."""
    ids = IDS.get(name, IDS["anna"])[index:]
    return driver.run(name, tokens=ids, continue_=True, max_tokens=12, logit_bias=NO_END)


@pytest.mark.parametrize("room", ["all", "one pool"])
def test_lanes_say_what_one_thread_says(
    engine: LlamaEngine, files: dict[str, Path], store: KVStore, room: str
) -> None:
    said: dict[str, list[list[int]]] = {}
    for lanes in ("inline", "free"):
        said[lanes] = conversations(engine, files, store, lanes, room)
    assert said["free"] == said["inline"]


def conversations(
    engine: LlamaEngine, files: dict[str, Path], store: KVStore, lanes: LanesKind, room: str
) -> list[list[int]]:
    """Three models talk at once, four turns each; the ids of all answers."""
    driver = RealDriver(engine, files, store=store, lanes=lanes)
    parts = [driver.estimate(name, PoolShape(256, 1)) for name in SPECS]
    tight = sum(part.weights_bytes for part in parts) + max(part.pool_bytes for part in parts)
    driver.budget(BUDGET if room == "all" else tight)
    for name in SPECS:
        driver.load(name, name, n_ctx=256)
    said: list[list[int]] = []
    for index in range(4):
        for attempt in driver.finish(*[say(driver, name, index) for name in SPECS]):
            assert attempt.done.usage.reprefilled_tokens == 0
            said.append(attempt.ids)
        driver.core.settle()
        assert driver.core.residency.resident_bytes() <= driver.budget_bytes
    assert room == "all" or driver.core.switches >= 3
    driver.leave()
    driver.lanes.close()
    return said


def test_conversations_of_one_model_swap_beside_another_that_streams(
    engine: LlamaEngine, files: dict[str, Path], store: KVStore
) -> None:
    alone: dict[str, list[list[int]]] = {}
    for name in ("dora", "emil"):
        driver = RealDriver(engine, files, store=store)
        driver.load(name, "anna", n_ctx=512)
        alone[name] = [driver.finish(say(driver, name, index))[0].ids for index in range(6)]
        driver.leave()
    driver = RealDriver(engine, files, store=store, lanes="free")
    driver.load("bert", "bert", n_ctx=4096)
    driver.load("dora", "anna", n_ctx=512)
    driver.load("emil", "anna", n_ctx=512)
    stream = driver.run("bert", tokens=IDS["bert"], max_tokens=None, logit_bias=NO_END)
    streamed = driver.attempts[stream]
    while not streamed.ids:
        driver.step()
    beside = 0
    for index in range(6):
        for name in ("dora", "emil"):
            before = len(streamed.ids)
            attempt = driver.finish(say(driver, name, index))[0]
            assert attempt.ids == alone[name][index]
            assert attempt.done.usage.reprefilled_tokens == 0
            # A single turn may be over before the machine has given the stream a core.
            beside += len(streamed.ids) > before
    assert streamed.end or beside >= 2
    assert driver.core.swaps >= 2 * 5
    driver.cancel(stream)
    driver.finish(stream)
    driver.leave()
    driver.lanes.close()


@pytest.mark.parametrize("lanes", ["inline", "free"])
def test_a_lane_does_not_go_on_behind_the_end_of_a_grammar(
    engine: LlamaEngine, store: KVStore, lanes: LanesKind
) -> None:
    """Lanes compute ahead by themselves, but only where nothing but a count ends an answer."""
    files = {"m": make_model(Spec(vocab="bytes"))}
    driver = RealDriver(engine, files, store=store, lanes=lanes)
    for name in ("anna", "bert"):
        driver.load(name, "m", n_ctx=256)
    words = [
        driver.run(name, prompt="Say: ", max_tokens=100, grammar=f"root ::= [{name[0]}-z]{{7}}")
        for name in ("anna", "bert")
    ]
    for attempt in driver.finish(*words):
        assert attempt.done.usage.stop_reason == "grammar"
        assert len(attempt.text) == 7
        assert attempt.done.usage.generated_tokens == len(attempt.ids) <= 7
    driver.leave()
    driver.lanes.close()
