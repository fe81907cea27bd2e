"""The core on lanes of its own, with a fake engine whose calls wait until the test lets them go."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_driver import GREEDY, MS, PATIENCE_S, Attempt, Driver, LateLanes
from fake_engine import BOS, FakeModel, FakePool, ModelSpec, reference

from vram_conductor.protocol.commands import Failed, Load, Loaded, RunDone, Unload, WorkerOk
from vram_conductor.protocol.errors import Internal
from vram_conductor.protocol.values import AgentKey, PoolShape
from vram_conductor.worker.watchdog import Watchdog

MODELS = [
    ModelSpec("full"),
    ModelSpec("window", rollback="window"),
    ModelSpec("chain", rollback="none"),
]
NAMES = [spec.model for spec in MODELS]
POOL = MODELS[0].pool_bytes(PoolShape(200, 1))


class Gate:
    """Calls that come here wait until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._inside = threading.Semaphore(0)

    def pass_through(self) -> None:
        self._inside.release()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def await_caller(self) -> None:
        assert self._inside.acquire(timeout=PATIENCE_S), "nobody came to the gate"

    def open(self) -> None:
        self._open.set()


class Free(Driver):
    """A driver on threads that does not wait for what a test holds up."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(MODELS, lanes="free", **fields)

    def step(self) -> bool:
        did = self.core.step(self.device.now_ns)
        self.collect()
        return did

    def until(self, done: Callable[[], Any]) -> None:
        """Step, as the loop does, until ``done``."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "it never came to that"
            if not self.step():
                try:
                    self.woken.get(timeout=0.01)
                except queue.Empty:
                    self.device.spend(1)

    def answer(self, op: int) -> Any:
        self.until(lambda: op in self.answers)
        return self.answers[op]

    def finish(self, *ops: int, steps: int = 0) -> list[Attempt]:
        wanted = [self.attempts[op] for op in (ops or self.attempts)]
        self.until(lambda: all(attempt.end for attempt in wanted))
        return wanted

    def told(self, op: int, more: int) -> Callable[[], bool]:
        """Whether a job has said so many tokens more than now."""
        attempt = self.attempts[op]
        goal = len(attempt.ids) + more
        return lambda: len(attempt.ids) >= goal

    def post(self, agent: str, model: str) -> int:
        """LOAD, without waiting for the answer."""
        shape = PoolShape(200, 1)
        path, weights_bytes, pool_bytes = self.sizes(model, shape)
        return self.send(
            Load,
            agent=AgentKey("local", agent),
            model=model,
            path=path,
            shape=shape,
            n_ctx=200,
            state_bytes=1000,
            weights_bytes=weights_bytes,
            pool_bytes=pool_bytes,
            budget_bytes=self.budget_bytes,
        )


@pytest.fixture
def driver() -> Iterator[Free]:
    one = Free(budget_bytes=2000)
    for model in NAMES:
        one.load(model, model)
    yield one
    one.lanes.close()


def right(driver: Driver, attempt: Attempt, model: str) -> bool:
    """Whether an answer is the undisturbed model's, as far as it goes."""
    assert attempt.prompt is not None
    limit = attempt.run.max_tokens or 1 << 30
    expected = reference(driver.specs[model], attempt.prompt, limit, GREEDY, n_ctx=200)
    return attempt.ids == expected[: len(attempt.ids)]


def endless(driver: Driver, agent: str, model: str = "") -> int:
    """A job whose answer is long, and a prompt that the model says much to."""
    spec = driver.specs[model or agent]
    for number in range(200):
        prompt = f"tell {number}"
        ids = [BOS, *prompt.encode()]
        if len(reference(spec, ids, 100, GREEDY)) == 100:
            return driver.run(agent, prompt=prompt, max_tokens=100)
    raise AssertionError("this model never says much")


def stop_decodes(driver: Driver, model: str, after: int = 0) -> Gate:
    """Decodes of one model wait; not the first ``after`` ones."""
    gate = Gate()
    handle = driver.core.residency.pools[f"{model}@f16"].handle
    assert isinstance(handle, FakePool)
    plain = handle.decode

    left = after

    def decode(batch: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            gate.pass_through()
        plain(batch)

    handle.decode = decode  # type: ignore[method-assign]
    return gate


def stop_moves(driver: Driver, which: str = "load") -> Gate:
    """Loads (or the fault of another name) wait."""
    gate = Gate()
    setattr(driver.engine.faults, which, lambda *_: gate.pass_through())
    return gate


# --- batches side by side -------------------------------------------------------------------------


def test_three_pools_compute_at_the_same_time(driver: Free) -> None:
    barrier = threading.Barrier(3)

    def meet(batch: object) -> None:
        barrier.wait(PATIENCE_S)

    driver.engine.faults.decode = meet
    ops = [driver.run(model, prompt="abc", max_tokens=1) for model in NAMES]
    for attempt, model in zip(driver.finish(*ops), NAMES, strict=True):
        assert right(driver, attempt, model)
    assert not barrier.broken


def test_a_lane_that_hangs_stops_nobody_else_and_is_noticed(driver: Free) -> None:
    gate = stop_decodes(driver, "window")
    hung, well = driver.run("window", prompt="abc"), endless(driver, "full")
    driver.until(driver.told(well, 5))
    gate.await_caller()
    watchdog = Watchdog(1000, 0)
    for now_ms in range(0, 1000, 100):
        mark, busy = driver.core.progress()
        assert not watchdog.hangs(mark, busy, 0, now_ms * MS)
        driver.until(driver.told(well, 1))
    assert watchdog.hangs(*driver.core.progress(), 0, 1000 * MS)
    assert driver.attempts[hung].ids == []
    gate.open()
    assert right(driver, driver.finish(hung)[0], "window")


def test_lanes_that_go_on_are_no_hang(driver: Free) -> None:
    ops = [endless(driver, model) for model in NAMES[:2]]
    watchdog, now_ms = Watchdog(1000, 0), 0
    while not any(driver.attempts[op].end for op in ops):
        now_ms += 400
        # Two of them are there, and one that was the oldest is not: that is movement.
        mark = driver.core.progress()[0]
        driver.until(lambda mark=mark: driver.core.progress()[0] != mark)  # type: ignore[misc]
        assert not watchdog.hangs(*driver.core.progress(), 0, now_ms * MS)
    assert now_ms > 1000, "longer than a lane may hang"


def test_a_cancel_stops_within_the_step(driver: Free) -> None:
    gate = stop_decodes(driver, "full")
    op = endless(driver, "full")
    driver.until(lambda: driver.attempts[op].prompt)
    gate.await_caller()
    driver.cancel(op)
    assert driver.attempts[op].end is None
    gate.open()
    attempt = driver.finish(op)[0]
    assert attempt.done.usage.stop_reason == "cancelled"
    assert attempt.ids == []
    computed = driver.engine.decoded_tokens
    for _ in range(5):
        driver.step()
    assert driver.engine.decoded_tokens == computed
    # What the batch left is no more than the transcript has.
    assert right(driver, driver.say("full", "and now"), "full")


def test_what_a_lane_has_computed_ahead_is_kept_by_a_cancel(driver: Free) -> None:
    """The engine thread has seen none of it when it hears of the cancel."""
    gate, passed = stop_decodes(driver, "full", after=3), driver.engine.decoded_tokens
    op = endless(driver, "full")
    driver.step()
    gate.await_caller()
    assert driver.engine.decoded_tokens > passed
    assert driver.attempts[op].ids == []
    driver.cancel(op)
    gate.open()
    attempt = driver.finish(op)[0]
    assert attempt.done.usage.stop_reason == "cancelled"
    assert len(attempt.ids) == 3
    assert right(driver, attempt, "full")
    after = driver.say("full", "and now")
    assert right(driver, after, "full")
    assert after.done.usage.reprefilled_tokens == 0
    assert after.prompt is not None
    assert after.done.usage.reused_tokens == len(after.prompt) - len("and now")


def test_a_cancel_of_another_pool_is_heard_at_once(driver: Free) -> None:
    gate = stop_decodes(driver, "full")
    driver.run("full", prompt="abc")
    op = endless(driver, "window")
    driver.until(driver.told(op, 3))
    gate.await_caller()
    driver.cancel(op)
    assert driver.finish(op)[0].done.usage.stop_reason == "cancelled"
    gate.open()
    driver.finish()


def test_what_ends_while_its_batch_is_under_way_ends_once(driver: Free) -> None:
    """Cancelled, forgotten and out of time, all at once."""
    gate = stop_decodes(driver, "full")
    op = driver.run("full", prompt="abc", timeout_ms=5)
    driver.until(lambda: driver.attempts[op].prompt)
    gate.await_caller()
    driver.device.spend(10)
    for _ in range(3):
        driver.step()
    waking_ns = driver.core.wake_ns()
    assert waking_ns is not None
    assert waking_ns > driver.device.now_ns, "nothing to wake up for before long"
    driver.cancel(op)
    gate.open()
    driver.forget("full")
    end = driver.finish(op)[0].end
    assert isinstance(end, Failed), "the first verdict counts"
    assert end.error.reason == "timeout"


# --- moves beside batches -------------------------------------------------------------------------


def test_streams_go_on_while_a_model_is_loaded_and_what_is_said_meanwhile_is_done_in_order(
    driver: Free,
) -> None:
    driver.unload("chain")
    gate = stop_moves(driver)
    stream = endless(driver, "full")
    driver.until(driver.told(stream, 1))
    loading = driver.post("late", "chain")
    gate.await_caller()
    driver.until(driver.told(stream, 5))
    assert driver.core.hauling
    # A job in a pool that is not touched starts; commands that change what is where wait.
    beside = driver.run("window", prompt="abc", max_tokens=3)
    again = driver.post("later", "chain")
    gone = driver.send(Unload, agent=AgentKey("local", "later"))
    forgotten = driver.run("later", prompt="abc")
    assert right(driver, driver.finish(beside)[0], "window")
    assert not {loading, again, gone} & driver.answers.keys()
    gate.open()
    assert isinstance(driver.answer(loading), Loaded)
    assert isinstance(driver.answer(again), Loaded)
    assert isinstance(driver.answer(gone), WorkerOk)
    assert driver.finish(forgotten)[0].failed.error.reason == "unknown_agent"
    assert list(driver.answers)[-3:] == [loading, again, gone]
    assert right(driver, driver.finish(stream)[0], "full")
    assert right(driver, driver.say("late", "hello"), "chain")


def test_a_failed_load_leaves_no_trace_and_no_gap(driver: Free) -> None:
    driver.unload("chain")
    stream = endless(driver, "full")

    def broken(path: str) -> None:
        raise Internal("load_failed", "no such thing")

    driver.engine.faults.load = broken
    answer = driver.answer(driver.post("late", "chain"))
    assert isinstance(answer, Failed)
    assert answer.error.reason == "load_failed"
    assert AgentKey("local", "late") not in driver.core.residency.agents
    assert "chain" not in driver.core.residency.weights
    assert right(driver, driver.finish(stream)[0], "full")


@pytest.fixture
def tight() -> Iterator[Free]:
    """Room for two of three pools, and a conversation of the third one that is parked."""
    one = Free(budget_bytes=300 + 2 * POOL, slice_ms=1)
    for model in NAMES:
        one.load(model, model)
    one.say("chain", "abcd efgh")
    one.say("window", "abcd")
    one.say("full", "abcd")
    yield one
    one.lanes.close()


def parked(driver: Free) -> str:
    """The one whose pool is closed."""
    pools = driver.core.residency.pools
    return next(name for name in NAMES if pools[f"{name}@f16"].handle is None)


def held_up(driver: Free) -> tuple[Gate, int, int]:
    """A stream goes on while the third pool's conversation is on its way back."""
    third = parked(driver)
    stays = next(name for name in ("full", "window") if name != third)
    gate = Gate()
    stream = endless(driver, stays)
    driver.until(driver.told(stream, 2))
    driver.engine.faults.open = lambda shape: gate.pass_through()
    op = driver.run(third, prompt=" more", continue_=True)
    driver.until(lambda: driver.core.hauling)
    gate.await_caller()
    return gate, stream, op


def test_a_haul_runs_beside_a_decode(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    tight.until(tight.told(stream, 5))
    assert tight.attempts[op].prompt is None
    gate.open()
    attempt = tight.finish(op)[0]
    assert right(tight, attempt, attempt.key.agent)
    assert attempt.done.usage.reprefilled_tokens == 0
    assert attempt.done.usage.swap.restored
    assert right(tight, tight.finish(stream)[0], tight.attempts[stream].key.agent)
    assert not tight.device.violations


def test_a_pool_that_computes_without_end_is_held_for_whoever_takes_its_room() -> None:
    driver = Free(budget_bytes=200 + POOL, slice_ms=1)
    driver.load("one", "full")
    driver.load("two", "window")
    stream = endless(driver, "one", "full")
    driver.until(driver.told(stream, 3))
    op = driver.run("two", prompt="abc", priority=5)
    attempt = driver.finish(op)[0]
    assert right(driver, attempt, "window")
    assert driver.attempts[stream].end is None
    assert right(driver, driver.finish(stream)[0], "full")
    assert driver.attempts[stream].done.usage.reprefilled_tokens == 0
    driver.lanes.close()


def test_two_pools_that_are_never_idle_at_once_are_held_until_they_are() -> None:
    """Whoever takes the room of both needs both quiet."""
    big = ModelSpec("big")
    driver = Driver([*MODELS[:2], big], budget_bytes=300 + 2 * POOL, slice_ms=1, lanes="late")
    for model in ("full", "window"):
        driver.load(model, model)
    driver.load("big", "big", n_ctx=400)
    driver.core.settle()
    streams = [endless(driver, model) for model in ("full", "window")]
    lanes = driver.lanes
    assert isinstance(lanes, LateLanes)

    def go_on() -> None:
        driver.core.step(driver.device.now_ns)
        if lanes.under_way:
            lanes.oldest()
        driver.collect()

    while not all(driver.attempts[op].ids for op in streams):
        go_on()
    op = driver.run("big", prompt="abc", max_tokens=3, priority=9)
    for _ in range(12):
        go_on()
    assert not all(driver.attempts[op].end for op in streams), "they had to say too little"
    assert driver.attempts[op].prompt is not None
    driver.finish()


def test_nobody_reads_a_vocabulary_that_is_on_its_way_out() -> None:
    driver = Free(budget_bytes=100 + POOL, slice_ms=1)
    driver.load("one", "full")
    driver.load("two", "window")
    driver.say("one", "abcd")
    weights, gate = driver.core.residency.weights["full"], Gate()
    assert isinstance(weights.handle, FakeModel)
    plain = weights.handle.close

    def close() -> None:
        gate.pass_through()
        plain()

    weights.handle.close = close  # type: ignore[method-assign]
    two = driver.run("two", prompt="abc", max_tokens=3)
    driver.until(lambda: driver.core.hauling)
    gate.await_caller()
    one = driver.run("one/side", prompt="abc", max_tokens=3)
    for _ in range(3):
        driver.step()
    (waits,) = [job for job in driver.core.jobs if job.agent.key.agent == "one"]
    assert waits.task is None
    assert waits.prompt is None
    gate.open()
    assert right(driver, driver.finish(two)[0], "window")
    assert right(driver, driver.finish(one)[0], "full")
    driver.lanes.close()


def test_a_job_that_is_cancelled_on_its_way_in_ends_when_the_moves_are_done(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    tight.cancel(op)
    for _ in range(3):
        tight.step()
    assert tight.attempts[op].end is None
    gate.open()
    attempt = tight.finish(op)[0]
    assert attempt.done.usage.stop_reason == "cancelled"
    assert attempt.prompt is None, "it never started"
    after = tight.say(attempt.key.agent, " more")
    assert right(tight, after, attempt.key.agent)
    assert after.done.usage.reprefilled_tokens == 0
    tight.finish(stream)


def test_a_job_that_runs_out_of_time_on_its_way_in(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    late = tight.run("window/side", prompt="abc", timeout_ms=3)
    tight.device.spend(10)
    tight.step()
    assert tight.attempts[late].failed.error.reason == "timeout", "it waits for nothing"
    gate.open()
    tight.finish(op, stream)


def test_moves_that_fail_are_that_jobs_error(tight: Free) -> None:
    third = parked(tight)

    def broken(shape: PoolShape) -> None:
        tight.engine.faults.open = lambda shape: None
        raise Internal("pool_failed", "no")

    stream = endless(tight, next(name for name in ("full", "window") if name != third))
    tight.until(tight.told(stream, 2))
    tight.engine.faults.open = broken
    op = tight.run(third, prompt=" more", continue_=True)
    assert tight.finish(op)[0].failed.error.reason == "pool_failed"
    assert right(tight, tight.finish(stream)[0], tight.attempts[stream].key.agent)
    assert right(tight, tight.say(third, " more"), third)


def test_a_lost_session_and_a_new_one_in_the_middle_of_a_haul(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    tight.core.lose_session()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    tight.welcome()
    assert not tight.core.hauling
    assert len(tight.core.jobs) == 0
    assert all(isinstance(tight.attempts[one].end, RunDone) for one in (stream, op))
    agents = dict(tight.agents)
    for name, spec in agents.items():
        tight.load(name.agent, spec.model)
    for model in NAMES:
        assert right(tight, tight.say(model, " more"), model)
    opener.join()


def test_a_drain_in_the_middle_of_a_haul_parks_everything(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    drain = tight.drain(drain_ms=60_000)
    refused = tight.run("window/side", prompt="abc")
    assert tight.attempts[refused].failed.error.reason == "worker_draining"
    gate.open()
    assert tight.finish(op)[0].failed.error.reason == "worker_draining"
    assert right(tight, tight.finish(stream)[0], tight.attempts[stream].key.agent)
    assert isinstance(tight.answer(drain), WorkerOk)
    assert tight.core.drained
    assert {item.agent for item in tight.store.states} == set(NAMES)
    assert tight.device.allocated_bytes == 300


def test_a_drain_that_gives_up_waits_for_what_is_under_way(tight: Free) -> None:
    gate, stream, _ = held_up(tight)
    drain = tight.drain(drain_ms=0)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    assert isinstance(tight.answer(drain), WorkerOk)
    assert tight.attempts[stream].end is not None
    opener.join()


def test_a_turn_in_a_pool_that_is_not_touched_starts_beside_a_haul(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    stays = tight.attempts[stream].key.agent
    tight.finish(stream)
    assert tight.core.hauling
    again = tight.say(stays, " more")
    assert tight.core.hauling, "it did not wait for the haul"
    assert right(tight, again, stays)
    assert again.done.usage.reprefilled_tokens == 0
    gate.open()
    tight.finish(op)


def test_a_turn_beside_a_haul_does_not_wait_for_what_wakes() -> None:
    """On a GPU weights wake on a thread of the hauler's: it waits for them, and nobody else."""
    driver = Free(budget_bytes=1 << 20, slice_ms=1, sleepable=True)
    driver.engine.device_kind = "cuda"
    for model in NAMES:
        driver.load(model, model)
        driver.say(model, "abcd")
    residency = driver.core.residency
    driver.budget(residency.resident_bytes() - 1)
    (asleep,) = [item.model for item in residency.weights.values() if item.asleep]
    awake = next(name for name in NAMES if name != asleep)
    driver.say(awake, " more")
    driver.budget(1 << 20)
    gate = stop_moves(driver, "wake")
    op = driver.run(asleep, prompt=" more", continue_=True)
    driver.until(lambda: driver.core.hauling)
    gate.await_caller()
    attempt = driver.say(awake, " more")
    assert right(driver, attempt, awake)
    assert driver.core.hauling
    assert driver.attempts[op].prompt is None, "its weights are not there yet"
    gate.open()
    attempt = driver.finish(op)[0]
    assert right(driver, attempt, asleep)
    assert attempt.done.usage.reprefilled_tokens == 0
    driver.lanes.close()


def test_a_budget_that_shrinks_waits_for_the_haul_and_is_kept_then(tight: Free) -> None:
    gate, stream, op = held_up(tight)
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    tight.budget(300 + POOL)
    assert tight.device.allocated_bytes <= 300 + POOL
    for attempt in tight.finish(stream, op):
        assert right(tight, attempt, attempt.key.agent)
        assert attempt.done.usage.reprefilled_tokens == 0
    assert not tight.device.violations
    opener.join()


def test_whoever_wants_to_look_sees_nothing_half_moved(tight: Free) -> None:
    """Moves may follow one another without a pause; then somebody has to ask for one."""
    gate, stream, op = held_up(tight)
    tight.core.rest(True)
    busy = {tight.attempts[one].key.agent for one in (stream, op)}
    (closed,) = set(NAMES) - busy
    other = tight.run(closed, prompt="abc", priority=9)
    gate.open()
    tight.until(lambda: not tight.core.hauling)
    for _ in range(5):
        tight.step()
        assert not tight.core.hauling
    tight.core.report()
    tight.core.rest(False)
    for attempt in tight.finish(stream, op, other):
        assert right(tight, attempt, attempt.key.agent)


def test_threads_of_lanes_end_with_their_pools() -> None:
    before = set(threading.enumerate())

    def lanes() -> set[str]:
        return {item.name for item in threading.enumerate() if item not in before}

    driver = Free(budget_bytes=300 + 2 * POOL)
    for model in NAMES:
        driver.load(model, model)
    for model in NAMES:
        driver.say(model, "abcd")
    open_pools = {k for k, pool in driver.core.residency.pools.items() if pool.handle}
    assert len(open_pools) == 2
    driver.until(lambda: lanes() - {f"lane {k}" for k in open_pools} == {"lane hauler"})
    driver.lanes.close()
    assert lanes() == set()
