"""Two threads park at once, the store is full, and one gives up what the other relies on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from core_driver import Driver, key
from fake_engine import ModelSpec

from vram_conductor.worker.job import Receipt
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import Conversation, PoolState, Slot

REASON = "not_parked: arena_full"


class Lock:
    """A reentrant lock; what somebody else does as soon as it is free is done at once."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock, self._depth, self._then = threading.RLock(), 0, then

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        free = self._depth == 0
        self._lock.release()
        if free:
            self._then()


@pytest.fixture
def driver() -> Iterator[Driver]:
    one = Driver([ModelSpec("full")])
    one.load("full", "full")
    one.say("full", "abc")
    yield one
    assert not one.device.violations


def placed(driver: Driver) -> tuple[Parking, Conversation, PoolState, Slot]:
    talk = driver.core.residency.conversations[key("full")]
    assert talk.pool is not None
    assert talk.slot is not None
    return driver.core._mover._parking, talk, talk.pool, talk.slot


def test_what_is_given_up_at_once_is_not_taken_for_parked(driver: Driver) -> None:
    parking, talk, _, slot = placed(driver)
    assert slot.clean
    commits = driver.store.commits

    def then() -> None:
        nonlocal commits
        if driver.store.commits > commits:
            commits = driver.store.commits
            parking._give_up(talk, REASON)

    shared = driver.core._store
    shared.lock = Lock(then)  # type: ignore[assignment]
    driver.say("full", "more")
    shared.lock = threading.RLock()
    assert key("full") not in driver.store.states
    assert not slot.clean, "its KV is nowhere else"
    driver.say("full", "and more")
    assert key("full") in driver.store.states


def test_what_is_given_up_while_its_slot_is_emptied_is_missed(driver: Driver) -> None:
    parking, talk, pool, slot = placed(driver)
    plain = parking.release

    def release(pool: PoolState, slot: Slot) -> None:
        parking._give_up(talk, REASON)
        plain(pool, slot)

    parking.release = release  # type: ignore[method-assign]
    driver.core._mover.empty(pool, slot, Receipt())
    parking.release = plain  # type: ignore[method-assign]
    assert talk.lost == REASON
    usage = driver.say("full", "more").done.usage
    assert usage.reprefill_reason == REASON
    assert usage.reprefilled_tokens > 0


def test_what_is_parked_and_stays_is_not_missed(driver: Driver) -> None:
    _, talk, pool, slot = placed(driver)
    driver.core._mover.empty(pool, slot, Receipt())
    assert talk.lost == ""
    assert driver.say("full", "more").done.usage.reprefilled_tokens == 0
