"""What is brought early: by a core on lanes, with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from core_driver import GREEDY, Attempt, Driver, key
from fake_engine import ModelSpec, reference

from vram_conductor.protocol.errors import Internal
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.prefetching import CALM_NS

MODELS = [ModelSpec("full"), ModelSpec("window", rollback="window")]


def calm(driver: Driver) -> None:
    """Step until nothing is under way and nothing more happens."""
    still = 0
    while still < 3:
        still = 0 if driver.step() or driver.core.progress()[1] else still + 1


def right(driver: Driver, attempt: Attempt) -> bool:
    assert attempt.prompt is not None
    spec = driver.specs["full" if attempt.key.agent in ("x", "y") else attempt.key.agent]
    return attempt.ids == reference(spec, attempt.prompt, 8, GREEDY)


@pytest.fixture
def driver() -> Iterator[Driver]:
    """Two conversations in one pool of two slots; both are parked, and the first is back."""
    one = Driver(MODELS, lanes="free")
    for name in ("x", "y"):
        one.load(name, "full", slots=2)
        one.say(name, "abcd efgh")
    one.budget(0)
    one.budget(100_000)
    yield one
    one.lanes.close()


def test_a_parked_conversation_comes_back_into_a_free_slot_before_it_is_asked(
    driver: Driver,
) -> None:
    assert driver.say("x", "more").done.usage.swap.restored
    calm(driver)
    talk = driver.core.residency.conversations[key("y")]
    assert talk.slot is not None
    assert talk.slot.clean, "its state is in the store, too"
    attempt = driver.say("y", "more")
    usage = attempt.done.usage
    assert right(driver, attempt)
    assert not usage.swap.restored
    assert usage.swap.bytes == 0
    assert usage.reprefilled_tokens == 0


def test_what_cannot_be_brought_is_tried_once_and_said_later(driver: Driver) -> None:
    tries = 0

    def broken() -> None:
        nonlocal tries
        tries += 1
        raise Internal("state_failed", "no")

    driver.say("x", "more")
    calm(driver)
    driver.budget(0)
    driver.budget(100_000)
    driver.engine.faults.set = broken
    driver.run("x", prompt=" and more", continue_=True)
    driver.finish()
    calm(driver)
    driver.engine.faults.set = lambda: None
    attempt = driver.say("y", "more")
    assert right(driver, attempt)
    assert tries == 2, "once for the job, once for the other one"
    assert attempt.done.usage.reprefill_reason == "state_failed"


def test_a_conversation_that_is_forgotten_on_its_way_back_is_gone(driver: Driver) -> None:
    driver.run("x", prompt="more", continue_=True)
    while not driver.core.hauling:
        driver.step()
    driver.forget("y")
    driver.finish()
    calm(driver)
    assert key("y") not in driver.core.residency.conversations
    fresh = driver.say("y", "abcd")
    assert fresh.done.usage.reused_tokens == fresh.done.usage.reprefilled_tokens == 0


def test_backups_are_made_when_it_is_calm() -> None:
    driver = Driver(MODELS, lanes="free", sleepable=True)
    refused = True

    def refuse() -> None:
        if refused:
            raise Internal("backup_failed", "not now")

    driver.engine.faults.back_up = refuse
    driver.load("full", "full")
    weights = driver.core.residency.weights["full"]
    assert not weights.backed
    refused = False
    weights.unbackable = False
    driver.say("full", "abcd")
    driver.step()
    assert not weights.backed, "somebody has just asked for something"
    driver.device.spend(CALM_NS / 1e6)
    driver.core.residency.revision += 1
    calm(driver)
    assert weights.backed
    driver.lanes.close()


def test_inline_nothing_is_brought_early() -> None:
    driver = Driver(MODELS)
    for name in ("x", "y"):
        driver.load(name, "full", slots=2)
        driver.say(name, "abcd efgh")
    driver.budget(0)
    driver.budget(100_000)
    driver.say("x", "more")
    for _ in range(20):
        driver.step()
    assert driver.core.residency.conversations[key("y")].slot is None
    assert driver.core.residency.pools["full@f16"].shape == PoolShape(400, 2)
