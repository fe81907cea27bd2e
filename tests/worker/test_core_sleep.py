"""The core with an engine that can sleep: three models take turns, and what can go wrong does."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from core_driver import GREEDY, Attempt, Driver, LanesKind
from fake_engine import FakeEngine, FakeModel, ModelSpec, reference
from fake_store import MemoryStore

from vram_conductor.protocol.commands import Budget, Failed, Loaded, WorkerOk
from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.job import Receipt
from vram_conductor.worker.seating import MOST_REFUSALS
from vram_conductor.worker.world import BackUp

MODELS = [
    ModelSpec("full"),
    ModelSpec("window", rollback="window"),
    ModelSpec("chain", rollback="none"),
]
POOL = MODELS[0].pool_bytes(PoolShape(200, 1))
ROOM_FOR_ONE = 100 + POOL
STATE = 16 + 4 * 200
"""An agent's largest state."""


class Refusals:
    """A fault that refuses whenever it is asked, or once, after it has let ``only`` pass.

    Attributes:
        asked: how often it was.
    """

    def __init__(self, reason: str, *, only: int | None = None) -> None:
        self.asked = 0
        self._reason, self._only = reason, only

    def __call__(self) -> None:
        self.asked += 1
        if self._only in (None, self.asked - 1):
            raise Internal(self._reason, "not now")


def right(driver: Driver, attempt: Attempt, model: str) -> bool:
    """Whether an answer is what the undisturbed model says."""
    assert attempt.prompt is not None
    limit = attempt.run.max_tokens or 1 << 30
    expected = reference(driver.specs[model], attempt.prompt, limit, GREEDY)
    return attempt.ids == expected[: len(attempt.ids)] and len(attempt.ids) > 0


def three(
    budget_bytes: int = ROOM_FOR_ONE,
    store: MemoryStore | None = None,
    lanes: LanesKind = "inline",
) -> Driver:
    """Three models on one device."""
    driver = Driver(MODELS, budget_bytes=budget_bytes, store=store, sleepable=True, lanes=lanes)
    for spec in MODELS:
        assert isinstance(driver.load(spec.model, spec.model), Loaded)
    return driver


def books(driver: Driver) -> None:
    """What is counted is what is taken."""
    residency = driver.core.residency
    residency.validate()
    assert driver.device.allocated_bytes == residency.resident_bytes()
    lent = sum(weights.lent_bytes for weights in residency.weights.values())
    assert driver.device.pinned_bytes == driver.store.lent_bytes == lent


def turns(driver: Driver, rounds: int = 3) -> None:
    for turn in range(rounds):
        for spec in MODELS:
            attempt = driver.say(spec.model, f"turn {turn}")
            assert right(driver, attempt, spec.model)
            assert attempt.done.usage.reprefilled_tokens == 0
    assert not driver.device.violations


def test_every_model_is_loaded_once_and_sleeps_from_then_on() -> None:
    driver = three()
    turns(driver)
    assert sorted(driver.engine.loads) == sorted(spec.path for spec in MODELS)
    assert driver.device.pinned_bytes == 300
    lines = {line.key: line.bytes for line in driver.core.report().host_lines}
    assert [lines[f"pinned:{spec.model}"] for spec in MODELS] == [100, 100, 100]
    weights = driver.core.residency.weights
    assert [weights[spec.model].asleep for spec in MODELS] == [True, True, False]
    shown = [line.key for line in driver.core.report().lines]
    assert shown == ["base", "weights:chain", "pool:chain@f16"]


def test_a_pool_is_opened_once_and_keeps_its_context() -> None:
    driver = three()
    turns(driver, 1)
    handles = [driver.core.residency.pools[f"{spec.model}@f16"].handle for spec in MODELS]
    turns(driver)
    assert handles == [driver.core.residency.pools[f"{spec.model}@f16"].handle for spec in MODELS]


def test_everything_stays_awake_where_it_fits() -> None:
    driver = three(3 * ROOM_FOR_ONE)
    turns(driver)
    assert (driver.core.switches, driver.core.swaps) == (0, 0)
    assert "sleep_weights" not in driver.core.residency.rates.report()


def test_backups_take_what_parked_states_leave() -> None:
    # Each agent's largest state, and one of them once more, come first.
    for spare, pinned in ((0, 0), (99, 0), (100, 100), (250, 200), (300, 300)):
        driver = Driver(
            MODELS,
            budget_bytes=300 + POOL,
            store=MemoryStore(4 * STATE + spare),
            sleepable=True,
        )
        for spec in MODELS:
            driver.load(spec.model, spec.model)
        # Whoever came early was backed up before the others' states were promised.
        assert driver.device.pinned_bytes == pinned
        assert driver.store.lent_bytes == pinned
        turns(driver, 1)


def test_a_promise_takes_the_oldest_backup_back() -> None:
    more = 2 * (16 + 4 * 50)
    driver = three(store=MemoryStore(300 + 4 * STATE + more - 50))
    turns(driver, 1)
    assert driver.device.pinned_bytes == 300
    driver.load("fourth", "window", n_ctx=50)
    assert driver.device.pinned_bytes == 300
    driver.load("fifth", "window", n_ctx=50)
    assert driver.device.pinned_bytes == 200
    # It slept, so it is unloaded with its backup, and loaded when it is needed.
    assert driver.core.residency.weights["full"].handle is None
    turns(driver, 2)
    assert driver.engine.loads.count(MODELS[0].path) > 1


def test_a_refused_backup_is_not_asked_for_again_and_weights_are_unloaded_instead() -> None:
    driver = Driver(MODELS, budget_bytes=ROOM_FOR_ONE, sleepable=True)
    refused = Refusals("backup_failed")
    driver.engine.faults.back_up = refused
    for spec in MODELS:
        driver.load(spec.model, spec.model)
    turns(driver, 2)
    assert driver.store.lent_bytes == driver.device.pinned_bytes == 0
    assert refused.asked == len(driver.engine.loads) > 3


def test_backups_do_not_ask_again_and_again_for_room_that_parked_states_take() -> None:
    driver = Driver(MODELS[:1], store=MemoryStore(2 * STATE + 100), sleepable=True)
    driver.load("full", "full")
    weights = driver.core.residency.weights["full"]
    driver.core._mover._loader.drop_backup(weights)
    # Nine conversations take more than their agent was promised.
    for index in range(9):
        driver.say(f"full/{index}", "abcd " * 12)
    assert driver.store.used_bytes > 2 * STATE
    assert driver.core._mover.backups() == ("full",)
    driver.core._mover.carry_out([BackUp("full")], Receipt())
    assert driver.device.pinned_bytes == 0
    assert driver.core._mover.backups() == ()
    for index in range(9):
        driver.forget(f"full/{index}")
    driver.load("full", "full")
    assert driver.core._mover.backups() == ("full",)
    driver.core._mover.carry_out([BackUp("full")], Receipt())
    assert driver.device.pinned_bytes == 100


def test_a_job_waits_while_others_have_the_memory_that_its_model_needs() -> None:
    driver = three()
    turns(driver, 1)
    # Nobody has told the worker; its budget still says that there is room.
    device = driver.device
    device.capacity_bytes, device.foreign_bytes = ROOM_FOR_ONE + 20, 21
    op = driver.run("full", prompt="abc")
    for _ in range(200):
        driver.step()
    assert driver.attempts[op].end is None
    assert driver.core.why_waiting(next(iter(driver.core.jobs))) in ("bytes", "budget")
    driver.budget(ROOM_FOR_ONE - 1)
    for _ in range(20):
        driver.step()
    assert driver.attempts[op].end is None
    device.foreign_bytes = 0
    driver.budget(ROOM_FOR_ONE)
    assert right(driver, driver.finish(op)[0], "full")
    turns(driver, 1)


def test_a_model_that_does_not_fit_meanwhile_starves_nobody_who_does() -> None:
    small = ModelSpec("small", weights_bytes=10)
    driver = Driver([MODELS[0], small], budget_bytes=ROOM_FOR_ONE, sleepable=True)
    for name in ("full", "small"):
        driver.load(name, name)
        driver.say(name, "abc")
    driver.device.capacity_bytes, driver.device.foreign_bytes = ROOM_FOR_ONE, 50
    large = driver.run("full", prompt="abc")
    driver.step()
    for turn in range(3):
        assert right(driver, driver.say("small", f"turn {turn}"), "small")
    assert driver.attempts[large].end is None
    driver.device.foreign_bytes = 0
    assert right(driver, driver.finish(large)[0], "full")


def test_a_job_that_waits_for_memory_keeps_its_deadline() -> None:
    driver = three()
    turns(driver, 1)
    driver.device.capacity_bytes = driver.device.foreign_bytes = ROOM_FOR_ONE
    op = driver.run("full", prompt="abc", timeout_ms=500)
    assert driver.finish(op)[0].failed.error.reason == "timeout"
    driver.device.foreign_bytes = 0
    turns(driver, 1)


@pytest.mark.parametrize(("after", "loads"), [(0, 4), (1, 3)], ids=["weights", "pool"])
@pytest.mark.parametrize("lanes", ["inline", "lockstep"])
def test_a_device_that_refuses_a_wake_costs_time_and_no_job(
    after: int, loads: int, lanes: LanesKind
) -> None:
    driver = three(lanes=lanes)
    turns(driver, 1)
    refused = Refusals("wake_failed", only=after)
    driver.engine.faults.wake = refused
    attempt = driver.finish(driver.run("full", prompt="abc", continue_=True))[0]
    assert right(driver, attempt, "full")
    assert not attempt.done.usage.reprefilled_tokens
    books(driver)
    turns(driver)
    assert len(driver.engine.loads) == loads
    books(driver)


@pytest.mark.parametrize("lanes", ["inline", "lockstep"])
def test_a_device_that_refuses_every_wake_is_served_by_loading(lanes: LanesKind) -> None:
    driver = three(lanes=lanes)
    turns(driver, 1)

    def refused() -> None:
        raise Internal("wake_failed", "never")

    driver.engine.faults.wake = refused
    turns(driver)
    books(driver)
    assert len(driver.engine.loads) > 6


def test_weights_that_are_read_and_cannot_be_woken_cost_their_job_after_some_tries() -> None:
    driver = three()
    turns(driver, 1)
    refused = Refusals("wake_failed")
    driver.engine.faults.wake = refused
    driver.core.residency.weights["full"].readers = 1
    failed = driver.finish(driver.run("full", prompt="abc", continue_=True))[0]
    assert failed.failed.error.reason == "wake_failed"
    # The pool was asked, too, and closed.
    assert refused.asked == 1 + 1 + MOST_REFUSALS
    assert right(driver, driver.say("chain", "abc"), "chain")
    books(driver)
    driver.core.residency.weights["full"].readers = 0
    turns(driver)
    books(driver)


@pytest.mark.parametrize("times", [1, 99])
def test_weights_that_are_read_and_refuse_to_sleep_stay_awake(times: int) -> None:
    driver = three()
    turns(driver, 1)
    read = driver.core.residency.weights["chain"]
    assert read.resident
    handle, left = read.handle, [times]
    assert isinstance(handle, FakeModel)
    whole = handle.sleep

    def refused() -> None:
        if not left[0]:
            whole()
            return
        left[0] -= 1
        raise Internal("sleep_failed", "not now")

    handle.sleep = refused  # type: ignore[method-assign]
    read.readers = 1
    attempt = driver.finish(driver.run("full", prompt="abc", continue_=True))[0]
    if times > MOST_REFUSALS:
        assert attempt.failed.error.reason == "sleep_failed"
        assert left[0] == times - 1 - MOST_REFUSALS
        assert read.resident
    else:
        assert right(driver, attempt, "full")
    books(driver)
    read.readers = left[0] = 0
    turns(driver)


def test_a_budget_waits_for_weights_that_are_read_and_refuse_to_sleep() -> None:
    driver = three()
    turns(driver, 1)
    read = driver.core.residency.weights["chain"]
    handle = read.handle
    assert isinstance(handle, FakeModel)

    def refused() -> None:
        raise Internal("sleep_failed", "not now")

    handle.sleep = refused  # type: ignore[method-assign]
    read.readers = 1
    op = driver.send(Budget, budget_bytes=0)
    assert isinstance(driver.answer(op), WorkerOk)
    assert read.resident
    books(driver)
    read.readers = 0
    driver.core._agents.released(read)
    assert driver.device.allocated_bytes == 0
    books(driver)
    driver.budget(ROOM_FOR_ONE)
    turns(driver)


def test_weights_that_lost_memory_in_a_sleep_that_failed_are_not_computed_with() -> None:
    driver = three()
    turns(driver, 1)
    read = driver.core.residency.weights["chain"]
    handle = read.handle
    assert isinstance(handle, FakeModel)
    whole = handle.sleep

    def half_way() -> None:
        whole()
        handle.sleep = whole  # type: ignore[method-assign]
        raise Internal("sleep_failed", "half-way")

    def refused() -> None:
        driver.engine.faults.wake = lambda: None
        raise Internal("wake_failed", "nor back")

    handle.sleep = half_way  # type: ignore[method-assign]
    driver.engine.faults.wake = refused
    read.readers = 1
    attempt = driver.finish(driver.run("full", prompt="abc", continue_=True))[0]
    assert right(driver, attempt, "full")
    assert read.asleep
    books(driver)
    read.readers = 0
    turns(driver)


def test_an_agent_is_admitted_though_what_it_shares_cannot_be_woken() -> None:
    driver = three(3 * ROOM_FOR_ONE)
    turns(driver, 1)
    driver.budget(0)
    driver.budget(3 * ROOM_FOR_ONE)
    assert driver.core.residency.pools["full@f16"].asleep
    refused = Refusals("wake_failed")
    driver.engine.faults.wake = refused
    assert isinstance(driver.load("again", "full", n_ctx=20), Loaded)
    assert refused.asked
    books(driver)
    assert right(driver, driver.say("again", "abc"), "full")
    turns(driver)


@pytest.mark.parametrize(("after", "loads"), [(0, 4), (1, 3)], ids=["weights", "pool"])
def test_what_refuses_to_sleep_is_unloaded_or_closed(after: int, loads: int) -> None:
    driver = three()
    turns(driver, 1)
    refused = Refusals("sleep_failed", only=after)
    driver.engine.faults.sleep = refused
    turns(driver)
    assert len(driver.engine.loads) == loads


@pytest.mark.parametrize("which", ["open", "load"])
def test_memory_that_runs_out_at_a_load_costs_that_agent_only(which: str) -> None:
    driver = Driver(MODELS, sleepable=True)
    driver.load("keep", "window")
    driver.say("keep", "abc")
    before = (driver.device.allocated_bytes, driver.device.pinned_bytes, driver.core.report())

    def full(_: object) -> None:
        raise ResourceExhausted(f"{which}_failed", "cudaMalloc: out of memory", retryable=True)

    setattr(driver.engine.faults, which, full)
    assert isinstance(driver.load("lost", "full"), Failed)
    after = (driver.device.allocated_bytes, driver.device.pinned_bytes, driver.core.report())
    assert after == before
    setattr(driver.engine.faults, which, lambda _: None)
    assert isinstance(driver.load("lost", "full"), Loaded)
    assert driver.say("keep", "def").done.usage.reprefilled_tokens == 0


def test_an_agent_is_registered_while_others_have_the_memory_of_its_sleeping_model() -> None:
    driver = three()
    turns(driver, 1)
    driver.device.capacity_bytes, driver.device.foreign_bytes = ROOM_FOR_ONE + 20, 21
    assert isinstance(driver.load("second", "full"), Loaded)
    driver.device.foreign_bytes = 0
    driver.device.spend(1000)
    assert right(driver, driver.say("second", "abc"), "full")
    turns(driver, 1)


def test_a_worker_that_leaves_parks_everything_and_wakes_nothing() -> None:
    driver = three()
    turns(driver, 1)
    before = driver.core.residency.rates.report().get("wake_weights")
    op = driver.drain()
    for _ in range(5):
        driver.step()
    assert op in driver.answers
    assert sorted(item.agent for item in driver.store.states) == ["chain", "full", "window"]
    assert driver.core.residency.rates.report().get("wake_weights") == before


def test_nothing_is_left_of_a_model_that_is_unloaded_in_its_sleep() -> None:
    driver = three()
    turns(driver, 1)
    for spec in MODELS:
        driver.unload(spec.model)
    assert driver.device.allocated_bytes == driver.device.pinned_bytes == 0
    assert driver.store.lent_bytes == 0


def test_a_budget_of_nothing_and_back() -> None:
    driver = three()
    turns(driver, 1)
    driver.budget(0)
    assert driver.device.allocated_bytes == 0
    driver.budget(ROOM_FOR_ONE)
    turns(driver, 1)
    assert len(driver.engine.loads) == 3


# --- beside one another ---------------------------------------------------------------------------


def on_a_gpu(driver: Driver) -> Driver:
    """Wakes of weights run on a thread of their own there."""
    driver.engine.device_kind = "cuda"
    return driver


def test_kv_comes_back_while_its_weights_still_wake() -> None:
    driver = three()
    turns(driver, 1)
    on_a_gpu(driver)
    copied = threading.Event()

    def wake() -> None:
        if threading.current_thread().name == "waker":
            assert copied.wait(20.0), "the state waits for the weights"

    driver.engine.faults.wake = wake
    driver.engine.faults.set = copied.set
    attempt = driver.say("full", "more")
    assert right(driver, attempt, "full")
    assert attempt.done.usage.swap.restored
    assert not driver.device.violations


def test_old_kv_leaves_while_the_new_weights_wake() -> None:
    driver = three()
    turns(driver, 1)
    on_a_gpu(driver)
    # A job that runs has a slot that no checkpoint covers.
    long = driver.run("chain", prompt="abc", continue_=True, max_tokens=100)
    while not driver.attempts[long].ids:
        driver.step()
    copied = threading.Event()

    def wake() -> None:
        if threading.current_thread().name == "waker":
            assert copied.wait(20.0), "the state waits for the weights"

    driver.engine.faults.wake = wake
    driver.engine.faults.get = copied.set
    quick = driver.run("full", prompt="def", continue_=True, max_tokens=5, priority=9)
    first, second = driver.finish(long, quick)
    assert right(driver, first, "chain")
    assert right(driver, second, "full")
    assert not driver.device.violations


def test_a_wake_that_fails_beside_other_moves_leaves_the_job_waiting() -> None:
    driver = three()
    turns(driver, 1)
    on_a_gpu(driver)
    left = [3]

    def wake() -> None:
        if threading.current_thread().name == "waker" and left[0]:
            left[0] -= 1
            raise ResourceExhausted("wake_failed", "not now", retryable=True, free_bytes=0)

    driver.engine.faults.wake = wake
    assert right(driver, driver.say("full", "more"), "full")
    assert left == [0]
    driver.core.residency.validate()
    turns(driver, 1)


# --- what a live context takes beyond its buffers -------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "device_kind", "cuda")


def scratchy(size: int) -> list[ModelSpec]:
    return [replace(spec, scratch_bytes=size) for spec in MODELS]


@pytest.mark.usefixtures("gpu")
def test_scratch_is_measured_once_at_the_first_opening_and_stays_in_its_sleep() -> None:
    driver = Driver(scratchy(7), budget_bytes=ROOM_FOR_ONE + 3 * 7, sleepable=True)
    warmed: list[int] = []
    driver.engine.faults.warm_up = lambda: warmed.append(1)
    for spec in MODELS:
        answer = driver.load(spec.model, spec.model)
        assert isinstance(answer, Loaded)
        assert answer.scratch_bytes == 7
    turns(driver)
    assert len(warmed) == 3
    assert driver.device.allocated_bytes == driver.core.residency.resident_bytes()
    shown = {line.key: line.bytes for line in driver.core.report().lines}
    assert [shown[f"scratch:{spec.model}@f16"] for spec in MODELS] == [7, 7, 7]


@pytest.mark.usefixtures("gpu")
def test_where_scratch_of_sleeping_contexts_is_missing_they_are_closed() -> None:
    driver = Driver(scratchy(7), budget_bytes=ROOM_FOR_ONE + 7, sleepable=True)
    for spec in MODELS:
        driver.load(spec.model, spec.model)
    turns(driver)
    assert sum(pool.handle is not None for pool in driver.core.residency.pools.values()) == 1
    assert len(driver.engine.loads) == 3


@pytest.mark.usefixtures("gpu")
def test_scratch_beyond_the_estimate_that_does_not_fit_is_that_agents_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Driver, "scratch", lambda *args: 0)
    driver = Driver(scratchy(7), budget_bytes=ROOM_FOR_ONE + 6, sleepable=True)
    driver.device.limit_bytes = 1 << 60
    answer = driver.load("full", "full")
    assert isinstance(answer, Failed)
    assert answer.error.details["code"] == "MEASURED"
    assert driver.device.allocated_bytes == driver.device.pinned_bytes == 0


@pytest.mark.usefixtures("gpu")
def test_a_first_computation_that_fails_costs_that_agent_only() -> None:
    driver = Driver(scratchy(7), sleepable=True)
    driver.load("keep", "window")
    driver.say("keep", "abc")

    def broken() -> None:
        driver.engine.faults.warm_up = lambda: None
        raise Internal("decode_failed", "llama_decode returned -3")

    driver.engine.faults.warm_up = broken
    assert isinstance(driver.load("lost", "full"), Failed)
    assert isinstance(driver.load("lost", "full"), Loaded)
    assert driver.say("keep", "def").done.usage.reprefilled_tokens == 0
