"""COPY in the core with a fake engine: copies go on as their originals would, and share nothing."""

from __future__ import annotations

import pytest
from core_driver import GREEDY, Attempt, Driver, LanesKind, key
from fake_engine import ModelSpec, reference
from fake_store import MemoryStore

from vram_conductor.protocol.commands import Copied, Copy, Failed
from vram_conductor.protocol.values import ConversationKey

MODELS = {
    "any": ModelSpec("full"),
    "window": ModelSpec("window", rollback="window"),
    "none": ModelSpec("chain", rollback="none"),
}
LANES: list[LanesKind] = ["inline", "lockstep", "free", "late"]


def start(rollback: str = "any", lanes: LanesKind = "inline", room: int = 1 << 30) -> Driver:
    spec = MODELS[rollback]
    driver = Driver(list(MODELS.values()), lanes=lanes, store=MemoryStore(room))
    driver.load("coder", spec.model)
    return driver


def right(driver: Driver, attempt: Attempt, rollback: str = "any") -> bool:
    assert attempt.prompt is not None
    return attempt.ids == reference(MODELS[rollback], attempt.prompt, 8, GREEDY)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("rollback", MODELS)
def test_a_copy_goes_on_as_the_original_would_without_computing_anything_again(
    rollback: str, lanes: LanesKind
) -> None:
    driver = start(rollback, lanes)
    first = driver.say("coder", "once upon a time").done.usage
    answer = driver.copied("coder", "coder/side")
    length = len(driver.records[key("coder")].ids)
    assert answer.n_tokens in (length, length - 1)
    assert (answer.reason, answer.state_bytes > 0) == ("", True)
    assert first.reprefilled_tokens == 0

    other = driver.say("coder/side", " there was")
    one = driver.say("coder", " there was")
    assert other.ids == one.ids
    for attempt in (one, other):
        assert right(driver, attempt, rollback)
        assert attempt.done.usage.reprefilled_tokens == 0
        assert attempt.done.usage.reused_tokens >= length - 1
    assert other.done.usage.swap.restored
    # From here on each goes its own way.
    for turn in range(3):
        for name in ("coder", "coder/side"):
            attempt = driver.say(name, f" {name} {turn}")
            assert right(driver, attempt, rollback)
            assert attempt.done.usage.reprefilled_tokens == 0
    assert driver.records[key("coder")].ids != driver.records[key("coder/side")].ids
    assert not driver.device.violations


@pytest.mark.parametrize("lanes", LANES)
def test_forgetting_one_leaves_the_other(lanes: LanesKind) -> None:
    for gone, kept in (("coder", "coder/side"), ("coder/side", "coder")):
        driver = start(lanes=lanes)
        driver.say("coder", "once upon a time")
        driver.copied("coder", "coder/side")
        driver.forget(gone)
        assert list(driver.store.states) == [key(kept)]
        attempt = driver.say(kept, " there was")
        assert right(driver, attempt)
        assert attempt.done.usage.reprefilled_tokens == 0


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_follows_at_once_sees_the_copy(lanes: LanesKind, seed: int) -> None:
    driver = Driver(list(MODELS.values()), lanes=lanes, seed=seed)
    # A second slot: nothing has to move before the copy can run.
    driver.load("coder", "full", slots=2)
    driver.load("twin", "full", slots=2)
    driver.say("coder", "once upon a time")
    copy = driver.fork("coder", "coder/side")
    op = driver.run("coder/side", prompt=" there", continue_=True, full=True)
    (attempt,) = driver.finish(op)
    assert isinstance(driver.answers[copy], Copied)
    assert attempt.done.usage.swap.restored
    assert attempt.done.usage.reprefilled_tokens == 0
    assert right(driver, attempt)


@pytest.mark.parametrize("lanes", LANES)
def test_the_original_may_run_meanwhile(lanes: LanesKind) -> None:
    driver = start(lanes=lanes)
    driver.say("coder", "once upon a time")
    before = list(driver.records[key("coder")].ids)
    op = driver.run("coder", prompt=" there was", continue_=True, max_tokens=20)
    copy = driver.fork("coder", "coder/side")
    driver.records[key("coder/side")].ids = before
    assert isinstance(driver.answer(copy), Copied)
    driver.finish(op)
    attempt = driver.say("coder/side", " there was")
    assert attempt.keep == len(before)
    assert right(driver, attempt)
    assert attempt.done.usage.reprefilled_tokens == 0


def test_where_there_is_no_room_nobody_makes_way_and_the_receipt_says_so() -> None:
    driver = start(room=1 << 30)
    driver.load("other", "full")
    driver.say("other", "a long time ago in a village")
    driver.say("coder", "once upon a time")
    driver.store.capacity_bytes = driver.store.used_bytes + 8
    kept = set(driver.store.states)
    answer = driver.copied("coder", "coder/side")
    assert (answer.n_tokens, answer.state_bytes) == (0, 0)
    assert answer.reason == "not_copied: arena_full"
    assert set(driver.store.states) == kept
    driver.store.capacity_bytes = 1 << 30
    tokens = len(driver.records[key("coder")].ids)
    attempt = driver.say("coder/side", " there was")
    usage = attempt.done.usage
    assert right(driver, attempt)
    assert (usage.reprefilled_tokens, usage.reprefill_reason) == (
        tokens - 1,
        "not_copied: arena_full",
    )
    assert driver.say("coder", " there was").ids == attempt.ids
    # Once it is told, it is over.
    assert driver.say("coder/side", " and").done.usage.reprefilled_tokens == 0


def test_without_a_parked_state_there_is_nothing_to_copy() -> None:
    driver = start()
    driver.say("coder", "once upon a time")
    driver.store.delete(key("coder"))
    assert driver.copied("coder", "coder/side").reason == "state_missing"
    usage = driver.say("coder/side", " there was").done.usage
    assert (usage.reprefilled_tokens > 0, usage.reprefill_reason) == (True, "state_missing")


def test_a_damaged_state_is_not_copied() -> None:
    driver = start()
    driver.say("coder", "once upon a time")
    driver.store.corrupt.add(key("coder"))
    assert driver.copied("coder", "coder/side").reason == "not_copied: state_corrupt"
    assert right(driver, driver.say("coder/side", " there was"))


def test_an_adopted_state_is_copied_too() -> None:
    driver = start()
    driver.say("coder", "once upon a time")
    driver.restart_worker()
    assert driver.copied("coder", "coder/side").n_tokens > 0
    attempt = driver.say("coder/side", " there was")
    assert right(driver, attempt)
    assert attempt.done.usage.reprefilled_tokens == 0


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (key("nobody"), key("nobody/side")),
        (key("other"), key("coder/side")),
        (ConversationKey("mallory", "coder", "main"), key("coder/side")),
    ],
)
def test_only_within_one_agent_that_is_here(
    source: ConversationKey, target: ConversationKey
) -> None:
    driver = start()
    driver.load("other", "full")
    driver.say("other", "a secret")
    answer = driver.answer(driver.send(Copy, source=source, target=target))
    assert isinstance(answer, Failed)
    assert answer.error.reason == "unknown_agent"
    assert len(driver.store.states) == 1


def test_a_conversation_that_runs_is_not_made_a_copy() -> None:
    driver = start()
    driver.say("coder", "once")
    op = driver.run("coder/side", prompt="upon")
    answer = driver.answer(driver.send(Copy, source=key("coder"), target=key("coder/side")))
    assert isinstance(answer, Failed)
    assert answer.error.reason == "conversation_busy"
    assert right(driver, driver.finish(op)[0])
