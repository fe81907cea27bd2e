"""Prompts are made beside the work: what may happen to a job, its agent and its model meanwhile."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from core_driver import MS, Driver
from fake_engine import BOS, FIRST_PAIR, PAIRS, FakeModel, ModelSpec

from vram_conductor.protocol.commands import Failed, Loaded, RunDone
from vram_conductor.protocol.values import Message
from vram_conductor.worker import preparer as lanes
from vram_conductor.worker.prepare import Task
from vram_conductor.worker.preparer import ThreadPreparer

SPECS = [ModelSpec("m"), ModelSpec("n")]


class HeldPreparer:
    """Carries tasks out when it is told to."""

    def __init__(self, room: int = 99) -> None:
        self.room = room
        self.tasks: list[Task] = []
        self._finished: list[Task] = []

    def submit(self, task: Task) -> bool:
        if len(self.tasks) >= self.room:
            return False
        self.tasks.append(task)
        return True

    def finished(self) -> list[Task]:
        done, self._finished = self._finished, []
        return done

    def go(self) -> None:
        for task in self.tasks:
            task.carry_out()
        self._finished, self.tasks = self._finished + self.tasks, []


def steps(driver: Driver, count: int = 10) -> None:
    for _ in range(count):
        driver.step()


def model_of(driver: Driver, name: str) -> FakeModel | None:
    weights = driver.core.residency.weights.get(name)
    handle = weights.handle if weights else None
    assert handle is None or isinstance(handle, FakeModel)
    return handle


@pytest.fixture
def held() -> HeldPreparer:
    return HeldPreparer()


@pytest.fixture
def driver(held: HeldPreparer) -> Driver:
    driver = Driver(SPECS, preparer=held)
    driver.load("a", "m")
    driver.load("b", "m")
    return driver


def test_others_run_while_a_prompt_is_made(driver: Driver, held: HeldPreparer) -> None:
    slow = driver.run("a", prompt="abcd")
    (task,) = held.tasks
    held.tasks = []
    other = driver.run("b", prompt="ab")
    held.go()
    assert driver.finish(other)[0].done
    assert driver.attempts[slow].prompt is None
    held.tasks = [task]
    held.go()
    assert driver.finish(slow)[0].done.usage.generated_tokens


def test_a_cancelled_jobs_result_is_dropped(driver: Driver, held: HeldPreparer) -> None:
    op = driver.run("a", prompt="abcd")
    (task,) = held.tasks
    driver.cancel(op)
    assert isinstance(driver.attempts[op].end, RunDone)
    again = driver.run("a", prompt="cd")
    held.go()
    assert task.prepared is None  # nobody wanted it any more
    assert driver.finish(again)[0].prompt == [BOS, FIRST_PAIR + PAIRS.index("cd")]


def test_a_result_that_comes_after_the_cancel_is_closed(driver: Driver, held: HeldPreparer) -> None:
    op = driver.run("a", prompt="abcd")
    (task,) = held.tasks
    task.carry_out()
    driver.cancel(op)
    held.go()
    steps(driver)
    assert task.prepared is not None
    assert task.prepared.sampler.closed  # type: ignore[attr-defined]
    assert driver.attempts[op].prompt is None


def test_time_runs_while_a_prompt_is_made(driver: Driver, held: HeldPreparer) -> None:
    op = driver.run("a", prompt="abcd", timeout_ms=100)
    driver.device.now_ns += 200 * MS
    steps(driver)
    assert driver.attempts[op].failed.error.reason == "timeout"


def test_a_refusal_comes_back(driver: Driver, held: HeldPreparer) -> None:
    op = driver.run("a", prompt="x" * 500)
    assert driver.attempts[op].end is None
    held.go()
    steps(driver, 1)
    assert driver.attempts[op].failed.error.reason == "prompt_too_long"
    assert driver.core.residency.weights["m"].readers == 0


def test_a_model_is_kept_open_while_it_is_read(driver: Driver, held: HeldPreparer) -> None:
    driver.run("a", prompt="abcd")
    handle = model_of(driver, "m")
    assert handle is not None
    driver.unload("a")
    driver.unload("b")
    steps(driver)
    assert handle.loaded
    assert not any(pool.open for pool in handle.pools)
    held.go()  # would read a closed vocabulary
    steps(driver)
    assert not handle.loaded
    assert "m" not in driver.core.residency.weights
    assert driver.device.allocated_bytes == 0


def test_a_model_that_is_read_can_be_had_again(driver: Driver, held: HeldPreparer) -> None:
    driver.run("a", prompt="abcd")
    handle = model_of(driver, "m")
    driver.unload("a")
    driver.unload("b")
    assert isinstance(driver.load("c", "m"), Loaded)
    held.go()
    steps(driver)
    assert model_of(driver, "m") is handle
    assert handle is not None
    assert handle.loaded
    op = driver.run("c", prompt="ab")
    held.go()
    assert driver.finish(op)[0].done
    assert len(driver.engine.loads) == 1


def test_a_smaller_budget_waits_for_the_reader(driver: Driver, held: HeldPreparer) -> None:
    driver.run("a", prompt="abcd")
    handle = model_of(driver, "m")
    assert handle is not None
    driver.device.limit_bytes = 1 << 40
    core = driver.core
    core._agents.set_budget(50, driver.device.now_ns)
    assert handle.loaded
    assert driver.device.allocated_bytes == SPECS[0].weights_bytes
    held.go()
    steps(driver, 1)
    assert driver.device.allocated_bytes == 0


def test_who_wants_the_room_of_a_model_that_is_read_waits(held: HeldPreparer) -> None:
    driver = Driver(SPECS, budget_bytes=320, preparer=held, slice_ms=10)
    assert isinstance(driver.load("a", "m", 100), Loaded)
    driver.load("b", "n", 100)
    slow = driver.run("a", prompt="abcd")
    steps(driver)
    quick = driver.run("b", prompt="ab")
    driver.device.now_ns += 1000 * MS
    steps(driver, 50)
    first, *_ = held.tasks
    assert first.model is model_of(driver, "m")
    assert driver.attempts[quick].end is None
    for _ in range(20):
        held.go()
        steps(driver, 50)
    assert driver.attempts[slow].done
    assert driver.attempts[quick].done
    assert not driver.device.violations


def test_no_more_is_under_way_than_there_is_room_for() -> None:
    held = HeldPreparer(room=1)
    driver = Driver(SPECS, preparer=held)
    for name in "abc":
        driver.load(name, "m")
    ops = [driver.run(name, prompt="ab") for name in "abc"]
    for _ in range(3):
        assert len(held.tasks) == 1
        held.go()
        steps(driver, 1)
    assert not held.tasks
    assert all(attempt.done for attempt in driver.finish(*ops))


def test_a_failed_submit_is_no_failure(driver: Driver, held: HeldPreparer) -> None:
    held.room = 0
    op = driver.run("a", prompt="ab")
    steps(driver)
    assert driver.attempts[op].end is None
    held.room = 9
    driver.device.now_ns += 1000 * MS
    steps(driver, 2)
    held.go()
    assert driver.finish(op)[0].done


def test_real_threads_give_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of these texts some are made on the spot, and some are not.
    monkeypatch.setattr(lanes, "TINY_CHARS", 3)
    plain = Driver(SPECS)
    woken = threading.Event()
    preparer = ThreadPreparer(woken.set)
    threaded = Driver(SPECS, preparer=preparer)
    for driver in (plain, threaded):
        for name, model in (("a", "m"), ("b", "n")):
            driver.load(name, model)
    for text in ("ab", "abcd", "a" * 100, "é"):
        for name in "ab":
            expected = plain.say(name, text)
            op = threaded.run(name, prompt=text, continue_=True)
            deadline = time.monotonic() + 20
            while threaded.attempts[op].end is None:
                assert time.monotonic() < deadline
                threaded.step()
            assert threaded.attempts[op].ids == expected.ids
    assert woken.is_set()
    preparer.close()


def test_short_prompts_do_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SHORT_CHARS", 50)
    monkeypatch.setattr(lanes, "TINY_CHARS", 0)
    go = threading.Event()
    finished = threading.Event()

    def tokenize(self: FakeModel, text: str, *, first: bool, most: int | None = None) -> object:
        if len(text) > 50:
            assert go.wait(20)
        return original(self, text, first=first, most=most)

    original = FakeModel.tokenize
    monkeypatch.setattr(FakeModel, "tokenize", tokenize)
    preparer = ThreadPreparer(finished.set)
    driver = Driver(SPECS, preparer=preparer)
    driver.load("a", "m")
    driver.load("b", "m")
    slow = driver.run("a", prompt="a" * 100)
    quick = driver.run("b", prompt="ab")
    deadline = time.monotonic() + 20
    while driver.attempts[quick].end is None:
        assert time.monotonic() < deadline
        driver.step()
    assert driver.attempts[slow].end is None
    go.set()
    while driver.attempts[slow].end is None:
        assert time.monotonic() < deadline
        driver.step()
    assert not isinstance(driver.attempts[slow].end, Failed)
    preparer.close()


def test_what_is_tiny_is_made_on_the_spot_and_a_template_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    woken = threading.Event()
    preparer = ThreadPreparer(woken.set)
    driver = Driver(SPECS, preparer=preparer)
    driver.load("a", "m")
    driver.run("a", prompt="ab", max_tokens=1)
    assert next(iter(driver.core.jobs)).prompt is not None
    driver.finish()
    assert not woken.is_set()
    monkeypatch.setattr(lanes, "TINY_TOKENS", 50)
    inputs: list[dict[str, Any]] = [{"messages": [Message("user", "ab")]}, {"tokens": [97] * 60}]
    for more in inputs:
        woken.clear()
        op = driver.run("a", max_tokens=1, **more)
        assert woken.wait(20)
        driver.finish(op)
    preparer.close()


def test_a_long_conversation_makes_a_short_prompt_no_long_one(
    driver: Driver, held: HeldPreparer
) -> None:
    op = driver.run("a", tokens=[97] * 150, max_tokens=1)
    assert held.tasks[0].size == 0
    held.go()
    driver.finish(op)
    appended = driver.run("a", prompt="abcd", continue_=True)
    assert held.tasks[0].size == 4
    driver.run("b", prompt="abcd")
    assert held.tasks[1].size == 4
    driver.cancel(appended)
    driver.run("a", prompt="abcd")
    assert held.tasks[2].size == 4 + 151
