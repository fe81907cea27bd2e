"""The watch over who touches what notices every kind of breach, so that silence means something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_driver import Driver
from fake_engine import ModelSpec

from vram_conductor.worker.residency import Residency
from vram_conductor.worker.traffic import Haul, Traffic

ONE, OTHER = "full@f16", "other@f16"


@pytest.fixture
def driver() -> Iterator[Driver]:
    one = Driver([ModelSpec("full"), ModelSpec("other")], lanes="late")
    for model in ("full", "other"):
        one.load(model, model)
        one.say(model, "abc")
    yield one
    one.lanes.close()


def hauled(driver: Driver, work: Callable[[], None] = lambda: None) -> list[Exception | None]:
    """A haul that touches one pool is under way; what went wrong with it comes into the list."""
    traffic: Traffic = driver.core._traffic
    ends: list[Exception | None] = []
    traffic.begin(Haul((frozenset([ONE]), frozenset(["full"])), work, ends.append))
    return ends


def breaks(driver: Driver, act: Callable[[], Any], where: str) -> None:
    with pytest.raises(AssertionError, match=where):
        act()
    assert where in driver.device.violations.pop()


def elsewhere(act: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return errors


def test_what_there_is_changes_only_while_nothing_is_hauled(driver: Driver) -> None:
    residency: Residency = driver.core.residency
    hauled(driver)
    for name in ("agents", "weights", "pools"):
        breaks(driver, getattr(residency, name).popitem, name)
        assert list(getattr(residency, name)), "looking is fine"
        assert elsewhere(getattr(residency, name).values), "not for a lane"


def test_conversations_and_jobs_are_the_engine_threads(driver: Driver) -> None:
    residency = driver.core.residency
    key = next(iter(residency.conversations))
    assert elsewhere(lambda: list(residency.conversations))
    driver.run("full", prompt="abc")
    assert elsewhere(driver.core.jobs.waiting)
    assert elsewhere(lambda: residency.conversations.pop(key))
    assert not elsewhere(lambda: residency.conversations.get(key))


def test_the_loader_is_the_hauls(driver: Driver) -> None:
    loader = driver.core._mover._loader
    loader.join()
    ends = hauled(driver, loader.join)
    breaks(driver, loader.join, "the haul's")
    driver.finish()
    driver.core.settle()
    assert ends == [None]


def test_a_pool_that_is_hauled_is_left_alone(driver: Driver) -> None:
    residency, parking = driver.core.residency, driver.core._mover._parking
    mine, others = residency.pools[ONE], residency.pools[OTHER]

    def work() -> None:
        parking.park(mine, mine.slots[0])
        parking.park(others, others.slots[0])

    ends = hauled(driver, work)
    parking.park(others, others.slots[0])
    breaks(driver, lambda: parking.park(mine, mine.slots[0]), ONE)
    driver.core.settle()
    assert isinstance(ends[0], AssertionError), "it touches none but its own, either"
    assert OTHER in driver.device.violations.pop()
    parking.park(mine, mine.slots[0])
