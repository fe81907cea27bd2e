"""What moves are said to have taken."""

from __future__ import annotations

import time
from typing import Any

import pytest
from core_driver import Driver
from fake_engine import ModelSpec
from fake_store import MemoryStore

from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.values import MoveRate, PoolShape
from vram_conductor.worker import rates as module
from vram_conductor.worker.rates import Rates

MODELS = [ModelSpec("one"), ModelSpec("two")]


def test_a_wake_is_told_by_its_parts_and_as_a_whole() -> None:
    room = MODELS[0].pool_bytes(PoolShape(200, 1)) + 100
    driver = Driver(MODELS, budget_bytes=room, store=MemoryStore(), sleepable=True)
    for spec in MODELS:
        assert isinstance(driver.load(spec.model, spec.model), Loaded)
    for turn in range(3):
        for spec in MODELS:
            driver.say(spec.model, f"turn {turn}")
    rates = driver.core.residency.rates.report()
    assert rates["wake"].count == rates["wake_weights"].count >= 4
    assert rates["wake"].bytes == rates["wake_weights"].bytes
    assert rates["wake"].ms >= rates["wake_weights"].ms
    assert rates["wake_pool"].count > 0


def test_small_moves_count_and_say_nothing_about_a_rate() -> None:
    rates = Rates()
    prior = rates.expect_ms("state_in", 1 << 24)
    rates.note("state_in", 1, 5.0)
    assert rates.expect_ms("state_in", 1 << 24) == prior
    rates.note("state_in", 1 << 24, 2.0)
    assert rates.expect_ms("state_in", 1 << 24) == 2.0
    assert rates.report()["state_in"].count == 2


def test_weights_that_wake_at_once_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(**fields: Any) -> MoveRate:
        time.sleep(0)  # lets others run in the middle of it
        return MoveRate(**fields)

    monkeypatch.setattr(module, "MoveRate", slow)
    models = [ModelSpec(f"m{number}") for number in range(6)]
    driver = Driver(models, budget_bytes=1 << 20, lanes="free", sleepable=True)
    for spec in models:
        driver.load(spec.model, spec.model)
    weights = list(driver.core.residency.weights.values())
    loader = driver.core._mover._loader
    for _ in range(20):
        for item in weights:
            loader.sleep(item)
        for item in weights:
            loader.start_wake(item)
        loader.join()
    driver.lanes.close()
    assert driver.core.residency.rates.report()["wake_weights"].count == 120
