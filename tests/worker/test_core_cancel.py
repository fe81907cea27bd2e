"""The core with a fake engine: cancelling at any moment, and what is left behind."""

from __future__ import annotations

import pytest
from core_driver import GREEDY, MS, Driver, key
from fake_engine import ModelSpec, reference

from vram_conductor.protocol.commands import Place
from vram_conductor.protocol.errors import Internal

MODELS = [
    ModelSpec("full"),
    ModelSpec("window", rollback="window"),
    ModelSpec("chain", rollback="none"),
]
KINDS = [spec.model for spec in MODELS]


@pytest.fixture
def driver() -> Driver:
    one = Driver(MODELS, budget_bytes=2000)
    for model in KINDS:
        one.load(model, model)
        one.load(f"{model}2", model)
    return one


def place(driver: Driver, conversation: str) -> Place:
    """What RESIDENCY says about a conversation."""
    places = {item.conversation: item for item in driver.core.report().places}
    return places[key(conversation)]


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("append", [True, False])
def test_a_job_cancelled_before_its_first_token_leaves_the_state_before(
    driver: Driver, model: str, append: bool
) -> None:
    driver.say(model, "abcd efgh ijkl")
    record = list(driver.records[key(model)].ids)
    op = driver.run(model, prompt="abcd xyz" * 10, continue_=append)
    driver.step()
    driver.step()
    attempt = driver.attempts[op]
    assert attempt.prompt is not None
    assert not attempt.ids
    driver.cancel(op)
    usage = attempt.done.usage
    assert (usage.stop_reason, usage.generated_tokens, usage.state_version) == ("cancelled", 0, 1)
    # Only KV of the transcript is left in the slot, or none.
    left = place(driver, model)
    assert left.n_tokens <= len(record) - 1 if left.where == "parked" else True
    assert left.n_tokens <= len(record)
    # Another conversation takes the slot; the checkpoint must not have suffered.
    driver.say(f"{model}2", "hello")
    after = driver.say(model, " more")
    assert after.prompt is not None
    assert after.prompt[: len(record)] == record
    assert after.ids == reference(driver.specs[model], after.prompt, 8, GREEDY)
    # The cancelled job may have computed the transcript's last token, which is as good.
    assert after.done.usage.reused_tokens in (len(record) - 1, len(record))
    assert after.done.usage.reprefilled_tokens == 0


def test_a_new_conversation_cancelled_before_its_first_token_is_absent(driver: Driver) -> None:
    op = driver.run("full", prompt="abcd" * 20)
    driver.step()
    driver.cancel(op)
    assert driver.attempts[op].done.where == "absent"
    assert driver.store.keys() == []
    assert driver.say("full", "x").done.usage.reused_tokens == 0


def test_after_the_first_token_what_was_said_stays(driver: Driver) -> None:
    op = driver.run("full", prompt="abc", max_tokens=100)
    while len(driver.attempts[op].ids) < 3:
        driver.step()
    driver.cancel(op)
    attempt = driver.attempts[op]
    usage = attempt.done.usage
    assert (usage.stop_reason, usage.generated_tokens, usage.state_version) == ("cancelled", 3, 1)
    assert attempt.done.parked_bytes > 0
    after = driver.say("full", "more")
    assert after.done.usage.reused_tokens == after.done.usage.prompt_tokens - 1 - len("more")


def test_a_cancel_stops_within_one_micro_batch(driver: Driver) -> None:
    op = driver.run("full", prompt="x" * 150)
    driver.step()
    computed = driver.engine.decoded_tokens
    driver.cancel(op)
    assert driver.attempts[op].end
    for _ in range(3):
        driver.step()
    assert driver.engine.decoded_tokens == computed <= driver.engine.batch_tokens


def test_a_waiting_job_is_cancelled_without_touching_the_running_one(driver: Driver) -> None:
    running = driver.run("full", prompt="abc", max_tokens=20)
    driver.step()
    waiting = driver.run("full2", prompt="def")
    driver.step()
    driver.cancel(waiting)
    assert driver.attempts[waiting].done.usage.stop_reason == "cancelled"
    assert driver.attempts[waiting].done.where == "absent"
    done = driver.finish(running)[0]
    assert done.prompt is not None
    assert done.ids == reference(driver.specs["full"], done.prompt, 20, GREEDY)


def test_a_job_that_waits_for_a_model_can_be_cancelled() -> None:
    driver = Driver(MODELS, budget_bytes=10)
    driver.load("one", "full")
    op = driver.run("one", prompt="abc")
    driver.step()
    assert driver.core.why_waiting(next(iter(driver.core.jobs))) == "budget"
    driver.cancel(op)
    assert driver.attempts[op].done.usage.stop_reason == "cancelled"
    driver.budget(5000)
    assert driver.say("one", "abc").ids


def test_a_cancel_after_the_end_says_nothing(driver: Driver) -> None:
    op = driver.run("full", prompt="abc", max_tokens=2)
    driver.finish(op)
    driver.cancel(op)
    driver.cancel(12345)
    assert driver.say("full", "more").ids


def test_forgetting_and_unregistering_end_the_running_job(driver: Driver) -> None:
    one = driver.run("full", prompt="abc", max_tokens=50)
    two = driver.run("window", prompt="abc", max_tokens=50)
    for _ in range(4):
        driver.step()
    driver.forget("full")
    assert driver.attempts[one].done.usage.stop_reason == "cancelled"
    driver.unload("window")
    assert driver.attempts[two].done.usage.stop_reason == "cancelled"
    assert driver.store.keys() == []
    fresh = driver.say("full", "abc")
    assert fresh.done.usage.reused_tokens == fresh.done.usage.reprefilled_tokens == 0
    driver.forget("full")
    driver.forget("full")


def test_a_reason_is_reported_once(driver: Driver) -> None:
    driver.say("full", "abcd")

    def broken() -> None:
        raise Internal("state_failed", "no")

    driver.engine.faults.get = broken
    driver.say("full", "efgh")
    driver.say("full2", "abcd")
    driver.engine.faults.get = lambda: None
    behind = driver.say("full", "ijkl")
    assert behind.done.usage.reprefill_reason == "not_parked: state_failed"
    driver.say("full2", "efgh")
    driver.store.delete(key("full"))
    assert driver.say("full", "m").done.usage.reprefill_reason == "state_missing"


def test_small_jobs_do_not_overtake_for_ever_one_that_needs_many_cells() -> None:
    driver = Driver(MODELS, slice_ms=100_000)
    for agent, n_ctx in (("big", 200), ("x", 60), ("y", 60), ("z", 60)):
        driver.load(agent, "full", n_ctx=n_ctx, slots=4)

    def small(name: str) -> int:
        return driver.run(f"big/{name}", prompt="q" * 89, max_tokens=10)

    running = {name: small(name) for name in "abc"}
    driver.step()
    # 380 cells, 300 of them reserved: this one needs 200.
    op = driver.run("big", prompt="z" * 189, max_tokens=10)
    asked = driver.device.now_ns
    while not driver.attempts[op].end:
        for name, last in list(running.items()):
            if driver.attempts[last].end:
                driver.forget(f"big/{name}")
                running[name] = small(name)
        driver.step()
        assert driver.device.now_ns - asked < 2_000 * MS, "starved"


def test_small_pools_do_not_overtake_for_ever_one_that_needs_more_bytes() -> None:
    small = [ModelSpec(name, weights_bytes=10) for name in "pqr"]
    driver = Driver(
        [*small, ModelSpec("big", weights_bytes=10)], budget_bytes=260, slice_ms=100_000
    )
    for spec in small:
        driver.load(spec.model, spec.model, n_ctx=100)
    driver.load("big", "big", n_ctx=200)
    serial = iter(range(1000))

    def next_job() -> int:
        """There is always work for a small pool that is not open."""
        pools = driver.core.residency.pools
        idle = [name for name in "pqr" if not driver.core.jobs.in_pool(f"{name}@f16")]
        name = min(idle, key=lambda name: pools[f"{name}@f16"].handle is not None)
        return driver.run(f"{name}/{next(serial)}", prompt="x" * 80, max_tokens=10)

    running = [next_job(), next_job()]
    driver.step()
    for _ in range(4):
        driver.step()
    op = driver.run("big", prompt="z" * 150, max_tokens=5)
    running.append(next_job())
    asked = driver.device.now_ns
    while not driver.attempts[op].end:
        ended = [item for item in running if driver.attempts[item].end]
        driver.step()
        running = [item for item in running if item not in ended]
        running += [next_job() for _ in ended]
        assert driver.device.now_ns - asked < 3_000 * MS, "starved"


def test_a_deadline_also_ends_a_job_that_waits() -> None:
    driver = Driver(MODELS, budget_bytes=10)
    driver.load("one", "full")
    op = driver.run("one", prompt="abc", timeout_ms=30)
    assert driver.core.wake_ns() == driver.device.now_ns + 30 * MS
    attempt = driver.finish(op)[0]
    assert attempt.failed.error.reason == "timeout"
    assert attempt.failed.error.details["waiting"] == "budget"
