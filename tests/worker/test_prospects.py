"""What the prefetch planner is shown of jobs and parked states."""

from __future__ import annotations

from core_driver import Driver, key
from fake_engine import ModelSpec

from vram_conductor.worker.planner import Blocked
from vram_conductor.worker.prefetch import BringKV, ParkedView
from vram_conductor.worker.prospects import parked, waiters

MODELS = [ModelSpec("full"), ModelSpec("window", rollback="window")]


def shared(*names: str) -> Driver:
    """Agents that take turns in a pool of one slot each."""
    driver = Driver(MODELS, sleepable=True)
    for name in names:
        driver.load(name, "full")
        driver.say(name, f"{name} abc", max_tokens=3)
    return driver


def test_waiting_jobs_come_in_the_order_in_which_they_will_be_served() -> None:
    driver = shared("a", "b", "c")
    core = driver.core
    ops = [
        driver.run(name, prompt="more", continue_=True, priority=level)
        for name, level in (("a", 0), ("b", 5))
    ]
    blocked = {job.seq: Blocked("slots") for job in core.jobs}
    found = waiters(core.jobs, blocked, driver.store, driver.device.now_ns)
    assert [item.conversation.agent for item in found] == ["b", "a"]
    assert [item.blocked for item in found] == ["slots", "slots"]
    assert all(item.parked for item in found)
    assert all(
        item.cells == len(driver.records[key(item.conversation.agent)].ids) + 4 + 8
        for item in found
    )
    driver.finish(*ops)


def test_parked_states_are_those_that_this_process_has_written() -> None:
    driver = shared("a", "b", "c")
    core = driver.core
    pool = core.residency.pools["full@f16"]
    # c is in the slot; none is free.
    assert parked(core.residency, core.jobs, driver.store) == []
    driver.forget("c")
    found = parked(core.residency, core.jobs, driver.store)
    tokens = {name: len(driver.records[key(name)].ids) - 1 for name in ("a", "b")}
    used = {name: core.residency.conversations[key(name)].used_ns for name in ("a", "b")}
    assert found == [
        ParkedView("full@f16", key(name), tokens[name], used[name]) for name in ("b", "a")
    ]
    driver.run("a", prompt="x", continue_=True)
    assert [
        item.conversation.agent for item in parked(core.residency, core.jobs, driver.store)
    ] == ["b"]
    driver.finish()
    assert pool.awake


def test_a_state_of_a_former_life_is_not_judged_before_its_tokens_are_known() -> None:
    driver = shared("a")
    driver.restart_worker()
    core = driver.core
    assert key("a") in driver.store.states
    assert parked(core.residency, core.jobs, driver.store) == []


def test_kv_that_came_early_is_what_the_job_goes_on_from() -> None:
    driver = shared("a", "b")
    driver.forget("b")
    core = driver.core
    talk = core.residency.conversations[key("a")]
    bring = BringKV("full@f16", 0, key("a"))
    assert core._mover.bring_kv(bring, talk.transcript.ids.view())
    had = len(driver.records[key("a")].ids)
    attempt = driver.say("a", "more")
    usage = attempt.done.usage
    assert usage.reused_tokens == had - 1
    assert not usage.swap.restored
    assert usage.reprefilled_tokens == 0


def test_kv_that_is_corrupt_is_found_out_early_and_said_later() -> None:
    driver = shared("a", "b")
    driver.forget("b")
    driver.store.corrupt.add(key("a"))
    talk = driver.core.residency.conversations[key("a")]
    bring = BringKV("full@f16", 0, key("a"))
    assert not driver.core._mover.bring_kv(bring, talk.transcript.ids.view())
    assert talk.slot is None
    usage = driver.say("a", "more").done.usage
    assert usage.reprefill_reason == "state_corrupt"
    assert usage.reprefilled_tokens > 0
