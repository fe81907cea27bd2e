"""What is brought before its turn: what fits, is worth it, and takes nothing from anybody."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_model import follow

from vram_conductor.protocol.values import ConversationKey, PoolShape
from vram_conductor.worker.prefetch import (
    FRESH_NS,
    BringKV,
    ParkedView,
    Waiter,
    plan_prefetch,
    worth,
)
from vram_conductor.worker.world import (
    BackUp,
    PoolView,
    SlotView,
    WakePool,
    WakeWeights,
    WeightsView,
    World,
)

SHAPE = PoolShape(100, 2)
NOW_NS = 10 * FRESH_NS


def talk(name: str) -> ConversationKey:
    return ConversationKey("p", name, "main")


def pool(key: str, *names: str, **fields: object) -> PoolView:
    """An awake pool of 100 bytes with two slots, and conversations of 40 cells in them."""
    slots = [SlotView(index, talk(name), 40) for index, name in enumerate(names)]
    slots += [SlotView(index) for index in range(len(names), 2)]
    view = PoolView(key, key, SHAPE, 100, SHAPE, 100, sleepable=True, slots=tuple(slots))
    return replace(view, wake_ms=2.0, **fields)  # type: ignore[arg-type]


def asleep(key: str) -> PoolView:
    return pool(key, asleep=True)


def weights(model: str, **fields: object) -> WeightsView:
    view = WeightsView(model, 50, resident=True, backed=True, wake_ms=10.0)
    return replace(view, **fields)  # type: ignore[arg-type]


def tired(model: str) -> WeightsView:
    return weights(model, resident=False, asleep=True)


def world(budget: int, *items: PoolView | WeightsView) -> World:
    pools = {item.key: item for item in items if isinstance(item, PoolView)}
    found = {item.model: item for item in items if isinstance(item, WeightsView)}
    return World(NOW_NS, budget, 0, {key: weights(key) for key in pools} | found, pools)


def waiter(key: str, name: str = "me", **fields: object) -> Waiter:
    return replace(Waiter(key, talk(name), 40, "bytes"), **fields)  # type: ignore[arg-type]


def test_weights_of_the_first_that_waits_for_bytes_wake_where_they_alone_fit() -> None:
    there = world(200, pool("b", "x"), asleep("a"), tired("a"), asleep("c"), tired("c"))
    assert there.resident_bytes() == 150
    first = [waiter("b", blocked="slots"), waiter("a"), waiter("c")]
    assert plan_prefetch(there, first, running_lanes=1) == WakeWeights("a")
    tight = replace(there, budget_bytes=199)
    assert plan_prefetch(tight, first, running_lanes=1) is None
    assert plan_prefetch(there, [waiter("a", blocked="")], running_lanes=1) is None


def test_a_pool_wakes_only_beside_its_weights() -> None:
    there = world(1000, pool("b", "x"), asleep("a"))
    assert plan_prefetch(there, [waiter("a")], running_lanes=1) == WakePool("a")
    grown = replace(asleep("a"), want=PoolShape(500, 2))
    assert plan_prefetch(world(1000, grown), [waiter("a")], running_lanes=1) is None


@pytest.mark.parametrize(("lanes", "is_worth"), [(0, True), (1, True), (3, True), (4, False)])
def test_a_wake_is_not_worth_more_than_what_all_others_lose(lanes: int, is_worth: bool) -> None:
    there = world(1000, asleep("a"), tired("a"))
    found = plan_prefetch(there, [waiter("a")], running_lanes=lanes)
    assert (found == WakeWeights("a")) == is_worth
    assert worth(10.0, lanes) == is_worth
    assert worth(10.0, lanes, slowdown=0.0)


def test_kv_of_waiting_jobs_comes_first_then_the_most_recently_used() -> None:
    there = world(1000, pool("a", "x"), pool("b", "x"))
    idle = [
        ParkedView("b", talk("old"), 40, NOW_NS - 5),
        ParkedView("b", talk("new"), 40, NOW_NS - 1),
    ]
    waits = [waiter("a", "me", blocked="", parked=True)]
    assert plan_prefetch(there, waits, idle) == BringKV("a", 1, talk("me"))
    assert plan_prefetch(there, [], idle) == BringKV("b", 1, talk("new"))
    # Somebody waits for this pool: its slots are not filled with what nobody asked for.
    assert plan_prefetch(there, [waiter("b", blocked="cells")], idle) is None
    old = [replace(item, used_ns=NOW_NS - FRESH_NS - 1) for item in idle]
    assert plan_prefetch(there, [], old) is None


def test_kv_needs_a_free_slot_and_free_cells_in_a_pool_that_is_awake() -> None:
    parked = [ParkedView("a", talk("me"), 61, NOW_NS)]
    assert plan_prefetch(world(1000, pool("a", "x")), [], parked) is None
    fits = [replace(parked[0], cells=60)]
    assert plan_prefetch(world(1000, pool("a", "x")), [], fits) == BringKV("a", 1, talk("me"))
    assert plan_prefetch(world(1000, pool("a", "x", "y")), [], fits) is None
    assert plan_prefetch(world(1000, pool("a", "me")), [], fits) is None
    assert plan_prefetch(world(1000, asleep("a")), [], fits) == WakePool("a")


def test_what_is_left_to_do_is_a_backup_where_nobody_works() -> None:
    there = world(1000, pool("a"))
    assert plan_prefetch(there, [], backups=["a", "b"]) == BackUp("a")
    assert plan_prefetch(there, [], backups=["a"], running_lanes=1) is None
    assert plan_prefetch(there, [waiter("a", blocked="slots")], backups=["a"]) is None


def test_where_nobody_works_everything_that_fits_wakes() -> None:
    new, old = replace(tired("a"), used_ns=2), replace(tired("b"), used_ns=1)
    there = world(100, asleep("a"), new, asleep("b"), old)
    assert plan_prefetch(there, []) == WakeWeights("a")
    assert plan_prefetch(there, [], running_lanes=1) is None
    assert plan_prefetch(there, [waiter("a", blocked="")]) is None
    one = world(150, asleep("a"), weights("a"), asleep("b"), old)
    assert plan_prefetch(one, []) == WakeWeights("b")
    both = world(200, asleep("a"), weights("a"), asleep("b"), weights("b"))
    assert plan_prefetch(both, []) == WakePool("a")
    assert plan_prefetch(replace(both, budget_bytes=199), []) is None
    stranger = replace(tired("a"), owned=False)
    assert plan_prefetch(world(100, asleep("a"), stranger), []) is None


@st.composite
def worlds(draw: st.DrawFn) -> World:
    items: list[PoolView | WeightsView] = []
    for key in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        names = draw(st.lists(st.sampled_from("xyz"), max_size=2, unique=True))
        sleeps = draw(st.booleans())
        items.append(asleep(key) if sleeps else pool(key, *(key + name for name in names)))
        items.append(tired(key) if draw(st.booleans()) else weights(key))
    there = world(0, *items)
    return replace(there, budget_bytes=there.resident_bytes() + draw(st.integers(0, 200)))


@given(there=worlds(), data=st.data())
def test_whatever_is_brought_fits_and_moves_nothing_else(there: World, data: st.DataObject) -> None:
    keys = st.sampled_from(sorted(there.pools))
    names = st.sampled_from(["ax", "by", "new"])
    waits = data.draw(
        st.lists(
            st.builds(
                Waiter,
                keys,
                names.map(talk),
                st.integers(1, 100),
                st.sampled_from(["", "bytes", "cells"]),
                st.booleans(),
            ),
            max_size=3,
        )
    )
    idle = data.draw(
        st.lists(
            st.builds(ParkedView, keys, names.map(talk), st.integers(1, 100), st.just(NOW_NS)),
            max_size=3,
        )
    )
    found = plan_prefetch(there, waits, idle, running_lanes=data.draw(st.integers(0, 5)))
    if isinstance(found, BringKV):
        view = there.pools[found.pool]
        assert view.awake
        assert view.slots[found.slot].conversation is None
        wanted = {item.conversation for item in waits} | {item.conversation for item in idle}
        assert found.conversation in wanted
    elif found is not None:
        after = follow(there, [found])
        assert after.resident_bytes() <= there.budget_bytes
