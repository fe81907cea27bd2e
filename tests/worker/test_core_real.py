"""The core with llama.cpp and real arenas: conversations that share a device with others say
exactly what they say alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest
from core_driver import Attempt, key
from gguf_models import Spec, make_model
from real_driver import RealDriver

from vram_conductor.protocol.values import KVType, Message, PoolShape
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.preparer import ThreadPreparer

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    one = KVStore(ArenaDir(tmp_path, "cpu"), 1 << 30)
    yield one
    one.close()


def talk(driver: RealDriver, agent: str, turns: int) -> list[list[int]]:
    """A chat with itself; the ids of every answer."""
    return [turn(driver, agent, index).ids for index in range(turns)]


def turn(driver: RealDriver, agent: str, index: int) -> Attempt:
    said = [Message("user", f"{agent} asks for the {index}. time about the red boat")]
    return driver.finish(driver.run(agent, messages=said, continue_=True, max_tokens=6))[0]


def random_turn(driver: RealDriver, agent: str, index: int) -> Attempt:
    seed = sum(agent.encode()) + index
    ids = [8 + (seed * 31 + item * 17) % 300 for item in range(5)]
    return driver.finish(driver.run(agent, tokens=ids, continue_=True, max_tokens=4))[0]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "jamba"])
def test_random_models_say_the_same_with_and_without_swaps(
    engine: LlamaEngine, store: KVStore, arch: str, kv_type: KVType
) -> None:
    spec = Spec(arch=arch, n_layer=7, tied=False) if arch == "gemma3" else Spec(arch=arch)  # type: ignore[arg-type]
    files = {"m": make_model(spec)}
    names = ["anna", "bert", "carl"]
    alone = {}
    for name in names:
        driver = RealDriver(engine, files, store=store)
        driver.load(name, "m", n_ctx=512, kv_type=kv_type)
        alone[name] = [random_turn(driver, name, index).ids for index in range(8)]
        driver.leave()
    driver = RealDriver(engine, files, store=store)
    for name in names:
        driver.load(name, "m", n_ctx=512, kv_type=kv_type)
    for index in range(8):
        for name in names:
            attempt = random_turn(driver, name, index)
            assert attempt.ids == alone[name][index]
            assert attempt.done.usage.reprefilled_tokens == 0
            assert attempt.done.usage.swap.restored == (index > 0)
    assert driver.core.swaps >= 2 * 7 * 3
    driver.leave()


@pytest.mark.real
def test_two_models_in_a_budget_for_one_pool_say_the_same_as_alone(
    engine: LlamaEngine, store: KVStore, smollm2: Path
) -> None:
    files = {"smollm2": smollm2, "tiny": make_model(Spec(arch="gemma3", n_layer=7, tied=False))}
    alone: dict[str, list[list[int]]] = {}
    for name in ("coder", "reviewer"):
        driver = RealDriver(engine, files, store=store)
        driver.load(name, "smollm2", n_ctx=512)
        alone[name] = talk(driver, name, 3)
        driver.leave()
    driver = RealDriver(engine, files, store=store)
    driver.load("writer", "tiny", n_ctx=512)
    alone["writer"] = [random_turn(driver, "writer", index).ids for index in range(3)]
    driver.leave()

    shape = PoolShape(512, 1)
    parts = [driver.estimate(name, shape) for name in files]
    budget = sum(part.weights_bytes for part in parts) + max(part.pool_bytes for part in parts)
    driver = RealDriver(engine, files, store=store, budget_bytes=budget)
    for name, model in (("coder", "smollm2"), ("reviewer", "smollm2"), ("writer", "tiny")):
        driver.load(name, model, n_ctx=512)
    for index in range(3):
        for name in ("coder", "writer", "reviewer"):
            one = random_turn if name == "writer" else turn
            attempt = one(driver, name, index)
            assert attempt.ids == alone[name][index]
            assert attempt.done.usage.reprefilled_tokens == 0
            assert driver.core.residency.resident_bytes() <= budget
    assert driver.core.switches >= 5
    driver.leave()


@pytest.mark.real
def test_a_preempted_answer_of_a_real_model_goes_on_unchanged(
    engine: LlamaEngine, store: KVStore, smollm2: Path
) -> None:
    driver = RealDriver(engine, {"m": smollm2}, store=store)
    driver.load("one", "m", n_ctx=512)
    quiet = driver.say("one", "The lighthouse keeper wrote down", max_tokens=24)
    driver.forget("one")
    driver.load("two", "m", n_ctx=512)
    op = driver.run("one", prompt="The lighthouse keeper wrote down", max_tokens=24)
    interruptions = 0
    while not driver.attempts[op].end:
        driver.step()
        # A job of higher priority takes the only slot in the middle of the answer.
        if len(driver.attempts[op].ids) == 5 * (interruptions + 1):
            interruptions += 1
            driver.finish(
                driver.run("two", prompt=f"{interruptions} birds", max_tokens=2, priority=9)
            )
    attempt = driver.attempts[op]
    assert interruptions >= 4
    assert attempt.ids == quiet.ids
    assert attempt.text == quiet.text
    assert attempt.done.usage.swap.restored
    assert attempt.done.usage.reprefilled_tokens == 0
    driver.leave()


@pytest.mark.real
def test_real_messages_reuse_the_history_and_roll_back(
    engine: LlamaEngine, store: KVStore, smollm2: Path
) -> None:
    driver = RealDriver(engine, {"m": smollm2}, store=store)
    driver.load("one", "m", n_ctx=512)
    messages = [Message("user", "Name a colour.")]
    first = driver.finish(driver.run("one", messages=list(messages), max_tokens=12))[0]
    had = len(driver.records[key("one")].ids)
    messages += [Message("assistant", first.text), Message("user", "And another one?")]
    second = driver.finish(driver.run("one", messages=list(messages), max_tokens=12))[0]
    assert second.done.usage.reused_tokens >= had - 2
    assert second.done.usage.reprefilled_tokens == 0
    # The last question again, in other words: everything before it is rolled back to.
    messages[-1] = Message("user", "And a shape?")
    third = driver.finish(driver.run("one", messages=list(messages), max_tokens=12))[0]
    assert third.done.usage.reused_tokens >= had - 2
    fresh = RealDriver(engine, {"m": smollm2}, store=store)
    fresh.load("two", "m", n_ctx=512)
    expected = fresh.finish(fresh.run("two", tokens=third.prompt, max_tokens=12))[0]
    # Other micro-batches: rounding may tell in the long run, a wrong rollback at once.
    assert third.ids[:4] == expected.ids[:4]
    fresh.leave()
    driver.leave()


@pytest.mark.real
def test_a_stream_keeps_its_pace_while_a_long_prompt_is_tokenised(
    engine: LlamaEngine, store: KVStore, smollm2: Path, gemma3: Path
) -> None:
    """Thousands of texts between special tokens of Gemma, eight times: seconds of tokenizing."""
    woken = threading.Event()
    preparer = ThreadPreparer(woken.set)
    files = {"m": smollm2, "g": gemma3}
    driver = RealDriver(engine, files, store=store, preparer=preparer)
    driver.load("streams", "m", 1024)
    driver.load("pastes", "g", 16_384)
    long = "".join(f"{number}\n\n" for number in range(20_000))
    # Whatever there is to find out about the vocabulary is found out now.
    first = driver.run("pastes", prompt=long)
    assert woken.wait(60)
    driver.step()
    assert driver.attempts[first].failed.error.reason == "prompt_too_long"
    op = driver.run("streams", prompt="Once upon a time", max_tokens=600)

    def gaps(until: Callable[[], bool]) -> list[float]:
        found: list[float] = []
        last, count = time.monotonic(), len(driver.attempts[op].ids)
        while not until():
            driver.step()
            if len(driver.attempts[op].ids) > count or driver.attempts[op].end:
                count, now = len(driver.attempts[op].ids), time.monotonic()
                found.append(now - last)
                last = now
        return found

    gaps(lambda: len(driver.attempts[op].ids) > 5)
    quiet = gaps(lambda: len(driver.attempts[op].ids) > 45)
    begin = time.monotonic()
    others = [driver.run(f"pastes/{number}", prompt=long) for number in range(8)]
    busy = gaps(lambda: all(driver.attempts[other].end for other in others))
    took = time.monotonic() - begin
    assert all(driver.attempts[other].failed for other in others)
    assert driver.attempts[op].end is None, "the stream was too short for this test"
    assert took > 10 * median(quiet), "the prompt was too quick for this test"
    assert len(busy) > took / median(quiet) / 8
    assert max(busy) < max(took / 3, 3 * max(quiet))
    driver.cancel(op)
    driver.leave()
    preparer.close()
