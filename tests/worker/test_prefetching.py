"""What comes early on lanes of their own: between turns, while nobody waits for it."""

from __future__ import annotations

import pytest
from core_driver import Driver, LanesKind, key
from fake_engine import ModelSpec

from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.values import PoolShape

MODELS = [ModelSpec("small"), ModelSpec("large")]
STEPS = 2000


def taking_turns(lanes: LanesKind) -> Driver:
    """Two agents with a slot each on one model, one on the other; room for one model."""
    room = 100 + MODELS[0].pool_bytes(PoolShape(400, 2))
    driver = Driver(MODELS, budget_bytes=room, sleepable=True, lanes=lanes)
    for name, model in (("a1", "small"), ("a2", "small"), ("b", "large")):
        assert isinstance(driver.load(name, model, slots=2 if model == "small" else 1), Loaded)
        driver.say(name, f"{name} abc", max_tokens=3)
    return driver


def comes_early(driver: Driver, agent: str) -> bool:
    talk = driver.core.residency.conversations[key(agent)]
    for _ in range(STEPS):
        if talk.slot is not None and not driver.core.hauling:
            return True
        driver.step()
    return False


@pytest.mark.parametrize("lanes", ["free", "late"])
def test_the_kv_of_who_is_not_asked_yet_comes_with_the_model_that_woke(lanes: LanesKind) -> None:
    driver = taking_turns(lanes)
    for _ in range(4):
        driver.say("b", "x", max_tokens=2)
        assert not driver.core.residency.pools["small@f16"].awake
        mine = driver.say("a1", "x", max_tokens=2).done.usage.swap
        assert mine.restored
        assert comes_early(driver, "a2")
        usage = driver.say("a2", "x", max_tokens=2).done.usage
        assert (usage.swap.bytes, usage.swap.restored, usage.swap.evicted) == (0, False, [])
        assert usage.reprefilled_tokens == 0
    assert not driver.device.violations


def test_nothing_comes_early_where_the_engine_thread_does_everything() -> None:
    driver = taking_turns("inline")
    driver.say("b", "x", max_tokens=2)
    driver.say("a1", "x", max_tokens=2)
    assert not comes_early(driver, "a2")
    assert driver.say("a2", "x", max_tokens=2).done.usage.swap.restored
