"""The core with a fake engine: pools and conversations that compete for the device."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from core_driver import GREEDY, MS, Attempt, Driver, key
from fake_engine import ModelSpec, reference
from fake_store import MemoryStore

from vram_conductor.protocol.commands import Failed, Loaded
from vram_conductor.protocol.errors import Code, Internal, ResourceExhausted
from vram_conductor.protocol.values import PoolShape

MODELS = [
    ModelSpec("full"),
    ModelSpec("window", rollback="window"),
    ModelSpec("chain", rollback="none"),
]
POOL = MODELS[0].pool_bytes(PoolShape(200, 1))


def right(driver: Driver, attempt: Attempt, model: str) -> bool:
    """Whether an answer is what the undisturbed model says."""
    assert attempt.prompt is not None
    limit = attempt.run.max_tokens or 1 << 30
    expected = reference(driver.specs[model], attempt.prompt, limit, GREEDY)
    return attempt.ids == expected[: len(attempt.ids)] and len(attempt.ids) > 0


@pytest.mark.parametrize("kind", ["any", "window", "none"])
def test_two_conversations_in_one_slot_swap_and_lose_nothing(kind: str) -> None:
    model = {"any": "full", "window": "window", "none": "chain"}[kind]
    driver = Driver(MODELS)
    driver.load("coder", model)
    driver.load("reviewer", model)
    for turn in range(4):
        for agent in ("coder", "reviewer"):
            attempt = driver.say(agent, f"<|user|>turn {turn}<|assistant|>")
            usage = attempt.done.usage
            assert right(driver, attempt, model)
            assert usage.reprefilled_tokens == 0
            assert usage.swap.restored == (turn > 0)
            if turn:
                other = "reviewer" if agent == "coder" else "coder"
                assert usage.swap.evicted == [f"local/{other}/main"]
                assert usage.swap.bytes > 0
                assert usage.swap.ms > 0
                assert usage.reused_tokens == usage.prompt_tokens - len(f"turn {turn}") - 3
    assert driver.engine.loads == [driver.specs[model].path]


def test_pools_take_turns_in_reserve_mode_and_weights_stay() -> None:
    driver = Driver(MODELS, budget_bytes=300 + POOL)
    for spec in MODELS:
        answer = driver.load(spec.model, spec.model)
        assert isinstance(answer, Loaded)
        assert answer.weights_bytes == 100
        # Only the first pool fits beside all weights.
        assert (answer.pool_bytes == POOL) == (spec is MODELS[0])
    for turn in range(3):
        for spec in MODELS:
            attempt = driver.say(spec.model, f"turn {turn}")
            assert right(driver, attempt, spec.model)
            assert attempt.done.usage.reprefilled_tokens == 0
    assert sorted(driver.engine.loads) == sorted(spec.path for spec in MODELS)
    assert not driver.device.violations


def test_weights_take_turns_where_they_do_not_fit_together() -> None:
    driver = Driver(MODELS, budget_bytes=100 + POOL)
    answers = [driver.load(spec.model, spec.model) for spec in MODELS]
    assert [item.weights_bytes for item in answers if isinstance(item, Loaded)] == [100, 100, 100]
    for turn in range(3):
        for spec in MODELS:
            attempt = driver.say(spec.model, f"turn {turn}")
            assert right(driver, attempt, spec.model)
            assert attempt.done.usage.reprefilled_tokens == 0
    assert len(driver.engine.loads) > 6
    assert not driver.device.violations


def test_nothing_is_evicted_while_everything_fits() -> None:
    driver = Driver(MODELS)
    for spec in MODELS:
        driver.load(spec.model, spec.model)
    for turn in range(3):
        for spec in MODELS:
            attempt = driver.say(spec.model, f"turn {turn}")
            assert attempt.done.usage.swap.evicted == []
            assert attempt.done.usage.swap.restored is False
    assert (driver.core.switches, driver.core.swaps) == (0, 0)


def test_a_queue_over_three_models_needs_few_switches_and_nobody_waits_for_long() -> None:
    driver = Driver(MODELS, budget_bytes=300 + POOL)
    names = {"A": "full", "B": "window", "C": "chain"}
    for letter, model in names.items():
        driver.load(letter, model)
    before = driver.core.switches
    ops = [
        driver.run(f"{letter}/{index}", prompt=f"{letter} {index}", max_tokens=30)
        for index, letter in enumerate("ABAACABC")
    ]
    attempts = driver.finish(*ops)
    for letter, attempt in zip("ABAACABC", attempts, strict=True):
        assert right(driver, attempt, names[letter])
    assert driver.core.switches - before <= 3


def test_long_jobs_of_competing_pools_take_time_slices() -> None:
    driver = Driver(MODELS, budget_bytes=200 + POOL, slice_ms=100)
    driver.load("one", "full", n_ctx=200)
    driver.load("two", "window", n_ctx=200)
    hog = driver.run("one", prompt="ab" * 50, max_tokens=None)
    # Endless jobs: the hog is replaced as soon as it ends.
    began = driver.device.now_ns
    waited: list[float] = []
    for round_ in range(6):
        op = driver.run("two", prompt=f"hello {round_}", max_tokens=3)
        asked = driver.device.now_ns
        while not driver.attempts[op].end:
            driver.step()
            if driver.attempts[hog].end:
                driver.records.pop(key("one"))
                driver.forget("one")
                hog = driver.run("one", prompt="ab" * 50, max_tokens=None)
        waited.append((driver.device.now_ns - asked) / MS)
    assert max(waited) < 100 + 9 * 60 + 300
    assert driver.device.now_ns > began


def test_a_preempted_job_goes_on_as_if_nothing_had_happened() -> None:
    driver = Driver(MODELS, slice_ms=5)
    driver.load("one", "full")
    driver.load("two", "full")
    driver.load("three", "full")
    ops = [
        driver.run(name, prompt=f"{name} abc", max_tokens=80) for name in ("one", "two", "three")
    ]
    for attempt in driver.finish(*ops):
        assert right(driver, attempt, "full")
        assert attempt.done.usage.reprefilled_tokens == 0
    assert driver.core.swaps >= 6


def test_a_chat_of_higher_priority_does_not_wait_for_a_batch_job() -> None:
    driver = Driver(MODELS, slice_ms=60_000)
    driver.load("batch", "full")
    driver.load("chat", "full")
    slow = driver.run("batch", prompt="x" * 100, max_tokens=90)
    while not driver.attempts[slow].ids:
        driver.step()
    quick = driver.run("chat", prompt="hi", max_tokens=2, priority=5)
    driver.finish(quick)
    assert driver.attempts[slow].end is None
    assert right(driver, driver.finish(slow)[0], "full")


def test_aging_brings_the_batch_job_forward() -> None:
    driver = Driver(MODELS, slice_ms=10)
    driver.load("batch", "full")
    for index in range(3):
        driver.load(f"chat{index}", "full")
    batch = driver.run("batch", prompt="abc", max_tokens=3)
    chats: dict[int, int] = {}
    while not driver.attempts[batch].end:
        for index in range(3):
            op = chats.get(index)
            if op is None or driver.attempts[op].end:
                driver.forget(f"chat{index}")
                chats[index] = driver.run(
                    f"chat{index}", prompt="abcd" * 10, max_tokens=50, priority=2
                )
        driver.step()
        assert driver.device.now_ns < 60_000 * MS, "starved"
    assert driver.attempts[batch].done


def test_batching_serves_two_conversations_at_once() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full", slots=2)
    driver.load("two", "full", slots=2)
    first, second = (driver.run(name, prompt=f"{name}", max_tokens=30) for name in ("one", "two"))
    steps = driver.core.steps
    for attempt in driver.finish(first, second):
        assert right(driver, attempt, "full")
    longest = max(len(driver.attempts[op].ids) for op in (first, second))
    assert driver.core.steps - steps <= longest + 2
    assert driver.core.swaps == 0


def test_a_smaller_agent_needs_no_reload_and_a_larger_one_grows_the_pool() -> None:
    driver = Driver(MODELS)
    driver.load("middle", "full", n_ctx=100)
    driver.say("middle", "abcd")
    pool = driver.core.residency.pools["full@f16"]
    handle = pool.handle
    driver.load("small", "full", n_ctx=50)
    assert pool.handle is handle
    driver.say("small", "abcd")
    assert pool.handle is handle
    answer = driver.load("large", "full", n_ctx=300)
    assert isinstance(answer, Loaded)
    assert answer.pool_bytes == MODELS[0].pool_bytes(PoolShape(300, 1))
    for agent in ("middle", "small", "large"):
        attempt = driver.say(agent, "efgh")
        assert right(driver, attempt, "full")
        assert attempt.done.usage.reprefilled_tokens == 0
    assert driver.attempts[driver.run("small", prompt="x" * 50)].failed.error.details["n_ctx"] == 50
    assert driver.engine.loads == [MODELS[0].path]


def test_a_busy_pool_grows_when_that_is_needed_and_its_job_goes_on() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full", n_ctx=100)
    long = driver.run("one", prompt="abcd", max_tokens=60)
    for _ in range(5):
        driver.step()
    answer = driver.load("two", "full", n_ctx=150, slots=2)
    assert isinstance(answer, Loaded)
    assert answer.pool_bytes is None
    op = driver.run("two", prompt="y" * 120, max_tokens=20)
    for attempt in driver.finish(long, op):
        assert right(driver, attempt, "full")
        assert attempt.done.usage.reprefilled_tokens == 0
    shape = driver.core.residency.pools["full@f16"].shape
    assert shape == PoolShape(250, 2)


def test_an_agents_context_is_guaranteed_beside_others() -> None:
    driver = Driver(MODELS)
    driver.load("big", "full", n_ctx=120, slots=2)
    driver.load("tiny", "full", n_ctx=30, slots=2)
    # Two conversations of the big agent do not fit together: 240 > 150 cells.
    ops = [driver.run(f"big/{name}", prompt="z" * 100, max_tokens=None) for name in "ab"]
    ops.append(driver.run("tiny", prompt="abc", max_tokens=None))
    for attempt in driver.finish(*ops):
        assert right(driver, attempt, "full")
        assert attempt.done.usage.stop_reason in ("eos", "length")


def test_a_smaller_budget_parks_everything_and_a_larger_one_brings_it_back() -> None:
    driver = Driver(MODELS, budget_bytes=300 + 3 * POOL)
    for spec in MODELS:
        driver.load(spec.model, spec.model)
    ops = [driver.run(spec.model, prompt="abc", max_tokens=40) for spec in MODELS]
    for _ in range(8):
        driver.step()
    driver.budget(50)
    assert driver.device.allocated_bytes == 0
    for _ in range(20):
        driver.step()
    assert not any(driver.attempts[op].end for op in ops)
    driver.budget(100 + POOL)
    for attempt, spec in zip(driver.finish(*ops), MODELS, strict=True):
        assert right(driver, attempt, spec.model)
        assert attempt.done.usage.reprefilled_tokens == 0
    assert not driver.device.violations


def test_a_budget_that_is_kept_evicts_nothing() -> None:
    driver = Driver(MODELS, budget_bytes=300 + 3 * POOL)
    for spec in MODELS:
        driver.load(spec.model, spec.model)
        driver.say(spec.model, "abc")
    driver.budget(300 + 3 * POOL - 1)
    open_pools = [pool for pool in driver.core.residency.pools.values() if pool.handle]
    assert len(open_pools) == 2
    driver.budget(300 + 2 * POOL)
    assert all(pool.handle for pool in open_pools)


def test_a_measured_surprise_is_that_jobs_error_and_leaves_nothing() -> None:
    sly = ModelSpec("sly", surprise_bytes=500)
    driver = Driver([*MODELS, sly], budget_bytes=200 + POOL)
    driver.load("full", "full")
    driver.load("sly", "sly")
    driver.say("full", "abc")
    driver.device.limit_bytes = 1 << 40
    attempt = driver.finish(driver.run("sly", prompt="abc"))[0]
    assert attempt.failed.error.reason == "VRAM_LEDGER_DENY"
    assert attempt.failed.error.details["code"] == "MEASURED"
    assert attempt.failed.error.details["measured_bytes"] == POOL + 500
    assert driver.device.allocated_bytes <= 200 + POOL
    assert driver.say("full", "def").done.usage.reprefilled_tokens == 0


def test_a_failed_load_leaves_no_trace() -> None:
    driver = Driver(MODELS)
    driver.load("keep", "window")
    driver.say("keep", "abc")
    before = (driver.device.allocated_bytes, driver.core.report())

    def broken(path: str) -> None:
        raise Internal("load_failed", "no such thing")

    driver.engine.faults.load = broken
    answer = driver.load("lost", "full")
    assert isinstance(answer, Failed)
    assert answer.error.reason == "load_failed"
    driver.engine.faults.load = lambda path: None

    def full(shape: PoolShape) -> None:
        raise ResourceExhausted("pool_failed", "out of memory")

    driver.engine.faults.open = full
    assert isinstance(driver.load("lost", "full"), Failed)
    assert (driver.device.allocated_bytes, driver.core.report()) == before
    driver.engine.faults.open = lambda shape: None
    assert driver.attempts[driver.run("lost", prompt="a")].failed.error.reason == "unknown_agent"
    assert isinstance(driver.load("lost", "full"), Loaded)
    assert driver.say("keep", "def").done.usage.reprefilled_tokens == 0


def test_one_copy_of_the_weights_until_the_last_agent_leaves() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "full")
    assert driver.engine.loads == [MODELS[0].path]
    driver.say("one", "abc")
    driver.unload("one")
    assert driver.store.keys() == []
    assert driver.say("two", "abc").done
    driver.unload("two")
    assert driver.device.allocated_bytes == 0
    assert not driver.core.residency.pools
    assert not driver.core.residency.weights
    assert driver.core.residency.conversations == {}
    driver.unload("two")


def test_a_full_store_costs_time_and_no_conversation() -> None:
    store = MemoryStore(capacity_bytes=150)
    driver = Driver(MODELS, store=store)
    driver.load("one", "full")
    driver.load("two", "full")
    driver.say("one", "abcd efgh")
    driver.say("two", "abcd efgh ijkl mnop")
    assert store.keys() == [key("one")]
    one = driver.say("one", "more")
    assert one.done.usage.reprefilled_tokens == 0
    two = driver.say("two", "more")
    assert two.done.usage.reprefill_reason == "not_parked: arena_full"
    assert two.done.usage.reprefilled_tokens > 0
    assert right(driver, two, "full")


def test_an_agents_own_old_conversations_make_room_in_a_full_store() -> None:
    store = MemoryStore(capacity_bytes=400)
    driver = Driver(MODELS, store=store)
    driver.load("one", "full")
    driver.load("two", "full")
    driver.say("two", "abcd")
    for index in range(9):
        driver.say(f"one/{index}", "abcd efgh")
    assert key("two") in store.states
    assert key("one/8") in store.states
    assert key("one/0") not in store.states
    old = driver.say("one/0", "more")
    assert old.done.usage.reprefill_reason == "not_parked: arena_full"
    assert right(driver, old, "full")


def test_many_conversations_of_one_agent_take_nothing_that_another_was_promised() -> None:
    store = MemoryStore(capacity_bytes=2450)
    driver = Driver(MODELS, store=store)
    driver.load("one", "full")
    driver.load("two", "full")
    for index in range(40):
        driver.say(f"one/{index}", "abcd efgh")
    assert store.used_bytes > 2380
    driver.say("two", "abcd efgh ijkl mnop")
    for index in range(4):
        driver.say(f"one/{30 + index}", "more")
        two = driver.say("two", "more")
        assert two.done.usage.reprefilled_tokens == 0
        assert right(driver, two, "full")
        assert key("two") in store.states


@pytest.mark.parametrize("reason", ["state_corrupt", "state_failed", "state_missing"])
def test_a_state_that_cannot_be_restored_is_computed_again(reason: str) -> None:
    driver = Driver(MODELS)
    driver.load("one", "window")
    driver.load("two", "window")
    driver.say("one", "abcd efgh")
    driver.say("two", "ijkl mnop")
    if reason == "state_corrupt":
        driver.store.corrupt.add(key("one"))
    elif reason == "state_missing":
        driver.store.delete(key("one"))
    else:

        def broken() -> None:
            raise Internal("state_failed", "half of it")

        driver.engine.faults.set = broken
    had = len(driver.records[key("one")].ids)
    attempt = driver.say("one", "more")
    driver.engine.faults.set = lambda: None
    usage = attempt.done.usage
    assert (usage.reprefilled_tokens, usage.reprefill_reason) == (had - 1, reason)
    assert (usage.reused_tokens, usage.swap.restored) == (0, False)
    assert right(driver, attempt, "window")
    assert driver.say("two", "more").done.usage.reprefilled_tokens == 0
    assert driver.say("one", "again").done.usage.reprefilled_tokens == 0


def test_a_state_that_ends_elsewhere_than_it_says_is_computed_again() -> None:
    driver = Driver(MODELS)
    driver.load("one", "window")
    driver.load("two", "window")
    driver.say("one", "abcd efgh")
    driver.say("two", "ijkl mnop")
    # Whole, and of fewer tokens.
    meta, blob = driver.store.states[key("one")]
    count, length, chain = struct.unpack_from("<iiQ", blob)
    shorter = struct.pack("<iiQ", count - 1, length, chain) + blob[16:]
    driver.store.states[key("one")] = (meta, shorter)
    attempt = driver.say("one", "more")
    assert attempt.done.usage.reprefill_reason == "state_failed"
    assert right(driver, attempt, "window")


def test_a_restarted_worker_adopts_what_was_parked() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "chain")
    for agent in ("one", "two"):
        driver.say(agent, "abcd efgh")
    driver.restart_worker()
    assert {item.conversation for item in driver.core.adopted()} == {key("one"), key("two")}
    for agent, model in (("one", "full"), ("two", "chain")):
        attempt = driver.say(agent, "more")
        assert right(driver, attempt, model)
        assert attempt.done.usage.swap.restored
        assert attempt.done.usage.reprefilled_tokens == 0


def test_states_of_another_build_are_deleted_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(MODELS)
    for agent in ("one", "two"):
        driver.load(agent, "full")
        driver.say(agent, "abcd efgh")
    meta, blob = driver.store.states[key("one")]
    driver.store.states[key("one")] = replace(meta, build="fake-0"), blob
    driver.restart_worker()
    # It is not on offer, and takes no room, before anybody asks for it.
    assert [item.conversation for item in driver.core.adopted()] == [key("two")]
    assert driver.store.keys() == [key("two")]
    assert "1 parked states of build fake-0 are of no use to this build fake-1" in caplog.text
    had = len(driver.records[key("one")].ids)
    for reason, again in (("other_build", had - 1), ("", 0)):
        attempt = driver.say("one", "more")
        usage = attempt.done.usage
        assert (usage.reprefill_reason, usage.reprefilled_tokens) == (reason, again)
        assert right(driver, attempt, "full")
    other = driver.say("two", "more")
    assert other.done.usage.reprefilled_tokens == 0


def test_orphans_are_deleted_and_foreign_states_are_not_used() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "full")
    driver.say("one", "abcd efgh")
    driver.say("two", "abcd efgh")
    del driver.records[key("two")]
    driver.records[key("one")].ids[3] += 1
    driver.restart_worker()
    assert driver.store.keys() == [key("one")]
    attempt = driver.say("one", "more")
    assert attempt.done.usage.reprefill_reason == "state_mismatch"
    assert right(driver, attempt, "full")


def test_a_crash_in_mid_answer_keeps_the_checkpoint_useful() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.say("one", "abcd efgh")
    had = len(driver.records[key("one")].ids)
    op = driver.run("one", prompt="go on", continue_=True, max_tokens=30)
    while len(driver.attempts[op].ids) < 2:
        driver.step()
    driver.restart_worker()
    attempt = driver.say("one", "more")
    assert attempt.done.usage.reused_tokens == had - 1
    assert attempt.done.usage.reprefill_reason == "state_older"
    assert right(driver, attempt, "full")


def test_a_new_broker_claims_what_the_old_one_had_loaded() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "window")
    driver.say("one", "abcd efgh")
    driver.run("two", prompt="abc", max_tokens=50)
    driver.step()
    driver.core.take_outbox()
    driver.attempts = {}
    driver.welcome(epoch=2)
    assert len(driver.core.jobs) == 0
    answer = driver.load("one", "full")
    assert isinstance(answer, Loaded)
    assert answer.pool_bytes == POOL
    assert driver.engine.loads == [MODELS[0].path, MODELS[1].path]
    assert driver.say("one", "more").done.usage.reprefilled_tokens == 0
    driver.device.spend(61_000)
    driver.step()
    assert set(driver.core.residency.weights) == {"full"}


def test_a_broker_that_comes_back_claims_its_agents_again() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("gone", "full", n_ctx=300)
    driver.say("one", "abcd efgh")
    op = driver.run("one", prompt="abc", continue_=True, max_tokens=50)
    driver.step()
    driver.step()
    driver.welcome()
    assert driver.attempts[op].done.usage.stop_reason == "cancelled"
    refused = driver.attempts[driver.run("one", prompt="abc")]
    assert refused.failed.error.reason == "unknown_agent"
    # The other agent was unregistered meanwhile: it is not loaded again.
    driver.agents.clear()
    answer = driver.load("one", "full")
    assert isinstance(answer, Loaded)
    # The pool that had room for both stays until somebody needs its room.
    assert answer.pool_bytes is None
    assert driver.say("one", "more").done.usage.reprefilled_tokens == 0
    assert driver.engine.loads == [MODELS[0].path]
    assert [agent.agent for agent in driver.core.residency.agents] == ["one"]


def test_agents_that_come_back_one_by_one_reopen_nothing() -> None:
    driver = Driver(MODELS)
    for name in ("one", "two", "three"):
        driver.load(name, "full", slots=3)
        driver.say(name, "abcd efgh")
    handle = driver.core.residency.pools["full@f16"].handle
    agents, driver.agents = driver.agents, {}
    driver.welcome()
    for back in agents:
        driver.load(back.agent, "full", slots=3)
    assert driver.core.residency.pools["full@f16"].handle is handle
    for name in ("one", "two", "three"):
        assert driver.say(name, "more").done.usage.reprefilled_tokens == 0


def test_a_pool_that_is_larger_than_wanted_gives_its_room_to_others() -> None:
    driver = Driver(MODELS, budget_bytes=200 + 10 + 300 + 10)
    driver.load("small", "full", n_ctx=100)
    driver.load("large", "full", n_ctx=300)
    driver.unload("large")
    driver.load("other", "window", n_ctx=200)
    assert driver.say("small", "abc").done
    assert driver.say("other", "abc").done
    assert driver.say("small", "abc").done
    assert not driver.device.violations
    assert driver.core.residency.pools["full@f16"].shape == PoolShape(100, 1)


def test_a_second_drain_is_answered_too() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.run("one", prompt="abc", max_tokens=150)
    first, second = driver.drain(drain_ms=60_000), driver.drain(drain_ms=5)
    for _ in range(10):
        driver.step()
    assert {first, second} <= driver.answers.keys()


def test_draining_parks_everything_and_refuses_new_work() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "full")
    running = driver.run("one", prompt="abc", max_tokens=40)
    driver.step()
    queued = driver.run("two", prompt="abc")
    op = driver.drain()
    assert driver.attempts[queued].failed.error.reason == "worker_draining"
    refused = driver.attempts[driver.run("two", prompt="abc")]
    assert refused.failed.error.code == Code.UNAVAILABLE
    assert refused.failed.error.retryable
    assert right(driver, driver.finish(running)[0], "full")
    driver.step()
    assert op in driver.answers
    assert driver.core.drained
    assert driver.store.keys() == [key("one")]


def test_a_drain_that_takes_too_long_ends_what_runs() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    op = driver.run("one", prompt="abc", max_tokens=150)
    driver.drain(drain_ms=10)
    for _ in range(20):
        driver.step()
    attempt = driver.attempts[op]
    if attempt.ids:
        assert key("one") in driver.store.states
    assert attempt.end is not None
    assert driver.core.drained


def test_a_job_for_another_model_does_not_kill_the_running_one() -> None:
    driver = Driver(MODELS, budget_bytes=100 + POOL)
    driver.load("one", "full")
    driver.load("two", "window")
    first = driver.run("one", prompt="abc", max_tokens=30)
    for _ in range(3):
        driver.step()
    second = driver.run("two", prompt="abc", max_tokens=30)
    for attempt, model in zip(driver.finish(first, second), ("full", "window"), strict=True):
        assert right(driver, attempt, model)
        assert attempt.done.usage.stop_reason in ("eos", "length")
    assert not driver.device.violations


def test_a_drain_lets_a_preempted_answer_end() -> None:
    driver = Driver(MODELS, slice_ms=1)
    driver.load("one", "full")
    driver.load("two", "full")
    ops = [driver.run(name, prompt="abc", max_tokens=30) for name in ("one", "two")]
    while not all(driver.attempts[op].ids for op in ops):
        driver.step()
    driver.drain(drain_ms=60_000)
    for attempt in driver.finish(*ops):
        assert right(driver, attempt, "full")
        assert attempt.done


def test_a_file_that_was_replaced_is_not_loaded_as_the_one_that_was_admitted() -> None:
    driver = Driver(MODELS)
    spec = driver.engine.specs[MODELS[0].path]
    driver.engine.specs[MODELS[0].path] = ModelSpec("other")
    answer = driver.load("one", "full")
    assert isinstance(answer, Failed)
    assert answer.error.reason == "model_changed"
    assert driver.device.allocated_bytes == 0
    driver.engine.specs[MODELS[0].path] = spec
    assert isinstance(driver.load("one", "full"), Loaded)
