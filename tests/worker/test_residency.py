"""Who is where: what RESIDENCY and READY say, and what the bookkeeping adds up to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_driver import Driver, key
from fake_engine import ModelSpec
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.values import AgentKey, PoolShape
from vram_conductor.worker import report as report_module
from vram_conductor.worker.residency import Agent, PoolState, Residency, Weights
from vram_conductor.worker.tape import Tape, common_prefix

MODELS = [ModelSpec("full"), ModelSpec("window", rollback="window")]


def test_a_report_has_the_ledgers_keys_and_adds_up() -> None:
    driver = Driver(MODELS, base_bytes=7)
    driver.load("one", "full", n_ctx=100)
    driver.load("two", "window", n_ctx=50)
    driver.say("one", "abcd")
    driver.say("two/side", "abcd")
    report = driver.core.report()
    assert [line.key for line in report.lines] == [
        "base",
        "weights:full",
        "weights:window",
        "pool:full@f16",
        "pool:window@f16",
    ]
    # A pool's size is of one shape; without it the ledger could not tell which.
    assert [line.shape for line in report.lines[3:]] == [PoolShape(100, 1), PoolShape(50, 1)]
    assert sum(line.bytes for line in report.lines) == report.own_bytes
    assert report.own_bytes == 7 + driver.device.allocated_bytes
    assert [line.key for line in report.host_lines] == [
        "parked:local/one/main",
        "parked:local/two/side",
    ]
    assert sum(line.bytes for line in report.host_lines) == driver.store.used_bytes
    places = {item.conversation: (item.where, item.n_tokens) for item in report.places}
    lengths = {name: len(record.ids) - 1 for name, record in driver.records.items()}
    assert places == {name: ("slot", lengths[name]) for name in places}
    driver.budget(7)
    report = driver.core.report()
    places = {item.conversation: (item.where, item.n_tokens) for item in report.places}
    assert places == {name: ("parked", lengths[name]) for name in places}
    assert [line.key for line in report.lines] == ["base"]


def test_tokens_alone_are_nothing_to_report() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.load("two", "full")
    op = driver.run("one", prompt="abcd", max_tokens=100)
    while len(driver.attempts[op].ids) < 3:
        driver.step()
    revision = driver.core.revision
    while len(driver.attempts[op].ids) < 9:
        driver.step()
    assert driver.core.revision == revision


def test_a_report_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    for number in range(6):
        driver.say(f"one/{number}", "ab")
    everything = driver.core.report()
    monkeypatch.setattr(report_module, "PLACES_MAX", 4)
    report = driver.core.report()
    assert {place.conversation for place in report.places} == {key(f"one/{n}") for n in "5432"}
    assert [line.key for line in report.host_lines] == [
        *(f"parked:local/one/{number}" for number in "2345"),
        "parked:others",
    ]
    assert report.host_lines[-1].detail == "2 more"
    sums = [sum(line.bytes for line in one.host_lines) for one in (everything, report)]
    assert sums[0] == sums[1]


def test_the_revision_changes_with_what_a_report_says() -> None:
    driver = Driver(MODELS)
    seen = {driver.core.revision}

    def changed() -> bool:
        fresh = driver.core.revision not in seen
        seen.add(driver.core.revision)
        return fresh

    driver.load("one", "full")
    assert changed()
    op = driver.run("one", prompt="abcd", max_tokens=30)
    driver.step()
    assert changed()
    driver.step()
    assert not changed()
    driver.finish(op)
    assert changed()
    driver.step()
    assert not changed()
    driver.budget(10)
    assert changed()
    driver.forget("one")
    assert changed()
    driver.unload("one")
    assert changed()


def test_load_tells_what_is_allocated_and_what_is_not_yet() -> None:
    driver = Driver(MODELS, budget_bytes=260)
    first = driver.load("one", "full", n_ctx=100)
    assert isinstance(first, Loaded)
    assert (first.weights_bytes, first.pool_bytes, first.scratch_bytes) == (100, 110, 0)
    # The second model's weights fit once the idle pool is closed, and then no pool does.
    second = driver.load("two", "window", n_ctx=100)
    assert isinstance(second, Loaded)
    assert (second.weights_bytes, second.pool_bytes, second.scratch_bytes) == (100, None, None)
    busy = driver.run("two", prompt="abc", max_tokens=30)
    driver.step()
    third = driver.load("three", "full", n_ctx=100)
    assert isinstance(third, Loaded)
    assert (third.weights_bytes, third.pool_bytes) == (None, None)
    assert driver.finish(busy)[0].ids


def test_loading_an_agent_again_changes_nothing() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full", n_ctx=100)
    driver.say("one", "abcd")
    before = driver.core.report()
    driver.load("one", "full", n_ctx=100)
    assert driver.core.report() == before
    assert driver.say("one", "efgh").done.usage.swap.evicted == []


def test_a_pool_that_shrank_keeps_its_room_until_that_is_needed() -> None:
    driver = Driver(MODELS, budget_bytes=700)
    driver.load("big", "full", n_ctx=300)
    driver.load("small", "full", n_ctx=100)
    driver.say("small", "abcd")
    driver.unload("big")
    pool = driver.core.residency.pools["full@f16"]
    assert pool.shape == PoolShape(300, 1)
    assert pool.want == PoolShape(100, 1)
    assert driver.say("small", "efgh").done.usage.swap.evicted == []
    driver.budget(300)
    assert driver.say("small", "ijkl").done.usage.reprefilled_tokens == 0
    assert pool.shape == PoolShape(100, 1)


def test_owned_things_follow_the_agents() -> None:
    residency = Residency(0, 1000)
    weights = residency.weights["m"] = Weights("m", "/m", 10)
    residency.pools["m@f16"] = PoolState("m@f16", weights, PoolShape(256, 1), 5)
    one, two = (Agent(AgentKey("p", name), "m", "f16", 256, 10) for name in "ab")
    assert residency.owned_models() == frozenset()
    residency.admit(one)
    residency.admit(two)
    residency.dismiss(one.key)
    assert residency.owned_pools() == {"m@f16"}
    residency.dismiss(two.key)
    assert residency.owned_pools() == residency.owned_models() == frozenset()
    assert residency.dismiss(two.key) is None


def test_validate_finds_what_does_not_fit_together() -> None:
    driver = Driver(MODELS)
    driver.load("one", "full")
    driver.say("one", "abcd")
    driver.core.residency.validate()
    driver.core.residency.conversations[key("one")].slot = None
    with pytest.raises(AssertionError):
        driver.core.residency.validate()


@given(
    st.lists(
        st.one_of(
            st.integers(0, 9),
            st.lists(st.integers(0, 9), max_size=200),
            st.integers(0, 100).map(lambda length: ("cut", length)),
            st.lists(st.integers(0, 9), max_size=3).map(lambda ids: ("set", ids)),
        ),
        max_size=20,
    )
)
def test_a_tape_is_a_list(changes: list[Any]) -> None:
    tape, model = Tape(), list[int]()
    for change in changes:
        match change:
            case int():
                tape.append(change)
                model.append(change)
            case ("cut", length):
                tape.truncate(length)
                del model[length:]
            case ("set", ids):
                tape.replace(np.array(ids, np.int32))
                model = list(ids)
            case ids:
                tape.extend(np.array(ids, np.int32))
                model += ids
        assert tape.ids().tolist() == model
        assert len(tape) == len(model)
        assert tape.view(1, 3).tolist() == model[1:3]
        assert tape.view(len(model) + 5).tolist() == []
        if model:
            assert tape.last() == model[-1]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(one: list[int], other: list[int]) -> None:
    length = common_prefix(np.array(one, np.int32), np.array(other, np.int32))
    assert one[:length] == other[:length]
    assert one[length : length + 1] != other[length : length + 1] or length == len(one)
