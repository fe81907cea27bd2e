"""Weights that stay for a while after their last use, and leave then: ``linger_s``."""

from __future__ import annotations

import pytest
from core_driver import Driver, LanesKind
from fake_engine import ModelSpec
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.values import AgentKey, PoolShape
from vram_conductor.worker.linger import SECOND_NS, due_ns, longest
from vram_conductor.worker.residency import Agent, Weights

MODELS = [ModelSpec("full"), ModelSpec("window", rollback="window")]
PATH = MODELS[0].path


@pytest.fixture(params=["inline", "lockstep"])
def driver(request: pytest.FixtureRequest) -> Driver:
    kind: LanesKind = request.param
    return Driver(MODELS, lanes=kind)


def later(driver: Driver, ms: float) -> None:
    driver.device.spend(ms)
    driver.step()


def resident(driver: Driver) -> list[str]:
    lines = [line.key for line in driver.core.report().lines]
    return [key.removeprefix("weights:") for key in lines if key.startswith("weights:")]


def test_idle_weights_leave_and_come_back_with_the_next_job(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=30)
    driver.say("coder", "one")
    later(driver, 29_000)
    assert resident(driver) == ["full"]
    later(driver, 2_000)
    assert resident(driver) == []
    assert driver.device.allocated_bytes == 0
    assert driver.core.report().lingered == 1
    usage = driver.say("coder", " two").done.usage
    assert usage.reprefilled_tokens == 0, "its state was parked"
    assert usage.swap.restored
    assert driver.engine.loads == [PATH, PATH]


def test_a_job_is_a_use(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=30)
    for _ in range(3):
        later(driver, 20_000)
        driver.say("coder", "x", max_tokens=2)
    assert driver.engine.loads == [PATH]


def test_the_core_says_when_it_wants_to_be_called(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=30)
    driver.say("coder", "one")
    later(driver, 61_000)  # past what a former broker might have left
    driver.say("coder", " two")
    wake_ns = driver.core.wake_ns()
    assert wake_ns is not None
    assert 29 * SECOND_NS < wake_ns - driver.device.now_ns <= 30 * SECOND_NS
    driver.device.now_ns = wake_ns - 1
    driver.step()
    assert resident(driver) == ["full"]
    driver.device.now_ns = wake_ns
    driver.step()
    assert resident(driver) == []
    assert driver.core.wake_ns() is None


def test_without_it_they_stay(driver: Driver) -> None:
    driver.load("coder", "full")
    later(driver, 10**8)
    assert resident(driver) == ["full"]


def test_the_agent_that_wants_them_longest_decides(driver: Driver) -> None:
    driver.load("short", "full", linger_s=5)
    driver.load("long", "full", linger_s=60)
    later(driver, 30_000)
    assert resident(driver) == ["full"]
    driver.load("always", "full")
    later(driver, 100_000)
    assert resident(driver) == ["full"]
    driver.unload("always")
    driver.unload("long")
    later(driver, 1)
    assert resident(driver) == [], "nobody has used it for 5 s"


def test_they_stay_for_a_while_when_their_last_agent_has_gone(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=30)
    driver.say("coder", "one")
    driver.unload("coder")
    assert resident(driver) == ["full"]
    assert driver.device.allocated_bytes == MODELS[0].weights_bytes, "its pool has gone"
    later(driver, 29_000)
    answer = driver.load("next", "full", linger_s=30)
    assert isinstance(answer, Loaded)
    later(driver, 29_000)
    assert driver.engine.loads == [PATH], "they were there"
    assert resident(driver) == ["full"], "its LOAD was a use"
    driver.unload("next")
    later(driver, 31_000)
    assert resident(driver) == []
    assert driver.device.allocated_bytes == 0
    assert not driver.core.residency.weights
    assert driver.core.report().lingered == 1


def test_the_next_agent_has_them_on_its_own_terms(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=30)
    driver.unload("coder")
    driver.load("next", "full")
    later(driver, 100_000)
    assert resident(driver) == ["full"]
    driver.budget(10)
    later(driver, 1)
    driver.budget(100_000)
    assert driver.say("next", "one").done.usage.generated_tokens, "they can be loaded again"


def test_without_it_they_go_with_their_last_agent(driver: Driver) -> None:
    driver.load("coder", "full")
    driver.unload("coder")
    assert driver.device.allocated_bytes == 0


def test_who_needs_the_room_takes_it_at_once() -> None:
    pool_bytes = MODELS[1].pool_bytes(PoolShape(200, 1))
    driver = Driver(MODELS, budget_bytes=MODELS[1].weights_bytes + pool_bytes)
    driver.load("coder", "full", linger_s=3600)
    driver.unload("coder")
    assert resident(driver) == ["full"]
    driver.load("other", "window")
    driver.say("other", "one")
    assert resident(driver) == ["window"]
    later(driver, 1)
    assert set(driver.core.residency.weights) == {"window"}
    assert driver.core.report().lingered == 0


def test_a_smaller_budget_takes_them(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=3600)
    driver.unload("coder")
    driver.budget(10)
    assert resident(driver) == []
    driver.budget(100_000)
    later(driver, 1)
    assert not driver.core.residency.weights


def test_a_new_broker_inherits_them(driver: Driver) -> None:
    driver.load("coder", "full", linger_s=100)
    driver.unload("coder")
    driver.welcome(2)
    later(driver, 61_000)
    assert resident(driver) == ["full"]
    later(driver, 40_000)
    assert resident(driver) == []


# --- the rule ---------------------------------------------------------------------------------

seconds = st.integers(0, 10**6)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.none() | seconds), max_size=6),
    st.integers(0, 10**18),
    st.none() | st.integers(0, 10**18),
    st.booleans(),
)
def test_the_rule(
    agents: list[tuple[str, int | None]], used_ns: int, leaves_ns: int | None, read: bool
) -> None:
    known = longest(
        Agent(AgentKey("p", f"n{number}"), model, "f16", 100, 10, linger_s)
        for number, (model, linger_s) in enumerate(agents)
    )
    weights = Weights("a", "a.gguf", 100, used_ns=used_ns, leaves_ns=leaves_ns)
    assert due_ns(weights, known) is None, "they are not loaded"
    weights.handle = object()  # type: ignore[assignment]
    weights.readers = int(read)
    mine = [linger_s for model, linger_s in agents if model == "a"]
    times = [used_ns + one * SECOND_NS for one in mine if one is not None]
    if read or None in mine:
        assert due_ns(weights, known) is None
    elif mine:
        assert due_ns(weights, known) == max(times)
    else:
        assert due_ns(weights, known) == leaves_ns
