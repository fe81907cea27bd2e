"""The planner where things can sleep: what goes how, in which order, and never too much."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_model import GONE, Replay, follow

from vram_conductor.protocol.values import ConversationKey, PoolShape
from vram_conductor.worker.eviction import choose, rank_all
from vram_conductor.worker.planner import (
    Blocked,
    Plan,
    Want,
    plan_open,
    plan_seat,
    plan_shrink,
    plan_weights,
)
from vram_conductor.worker.world import (
    ClosePool,
    Drop,
    LoadWeights,
    OpenPool,
    Park,
    PoolView,
    SleepPool,
    SleepWeights,
    SlotView,
    UnloadWeights,
    WakePool,
    WakeWeights,
    WeightsView,
    World,
)

ONE = PoolShape(100, 1)


def talk(name: str) -> ConversationKey:
    return ConversationKey("p", name, "main")


def pool(key: str, name: str = "", **fields: object) -> PoolView:
    """An open pool of 100 bytes with one slot; ``name``: whose conversation is in it."""
    slot = SlotView(0, talk(name) if name else None)
    view = PoolView(key, key, ONE, 100, ONE, 100, sleepable=True, wake_ms=3.0, slots=(slot,))
    return replace(view, cost_ms=30.0, **fields)  # type: ignore[arg-type]


def closed(key: str) -> PoolView:
    return PoolView(key, key, ONE, 100, cost_ms=30.0)


def asleep(key: str) -> PoolView:
    return pool(key, asleep=True)


def weights(model: str, **fields: object) -> WeightsView:
    """Weights of 50 bytes that are there and backed up."""
    view = WeightsView(model, 50, resident=True, backed=True, cost_ms=300.0, wake_ms=10.0)
    return replace(view, **fields)  # type: ignore[arg-type]


def tired(model: str) -> WeightsView:
    return weights(model, resident=False, asleep=True)


def world(budget: int, *items: PoolView | WeightsView) -> World:
    pools = {item.key: item for item in items if isinstance(item, PoolView)}
    found = {item.model: item for item in items if isinstance(item, WeightsView)}
    return World(1000, budget, 0, {key: weights(key) for key in pools} | found, pools)


def want(key: str = "a", name: str = "me", cells: int = 10) -> Want:
    return Want(key, talk(name), cells)


def dirty(view: PoolView) -> PoolView:
    return replace(view, slots=tuple(replace(slot, clean=False) for slot in view.slots))


# --- what goes, and how ---------------------------------------------------------------------------


def test_a_switch_with_room_for_one_sleeps_and_wakes() -> None:
    there = world(150, asleep("a"), tired("a"), pool("b", "x"))
    assert plan_seat(there, want()) == Plan(
        (SleepWeights("b"), WakeWeights("a"), Drop("b", 0), SleepPool("b"), WakePool("a"))
    )


def test_weights_wake_while_the_old_kv_is_still_on_its_way_out() -> None:
    there = world(150, asleep("a"), tired("a"), dirty(pool("b", "x")))
    assert plan_seat(there, want()) == Plan(
        (SleepWeights("b"), WakeWeights("a"), Park("b", 0), SleepPool("b"), WakePool("a"))
    )


def test_weights_begin_to_wake_before_the_pool_does() -> None:
    there = world(300, asleep("a"), tired("a"), pool("b", "x"))
    assert plan_seat(there, want()) == Plan((WakeWeights("a"), WakePool("a")))


def test_a_pool_that_sleeps_in_another_shape_is_opened_anew() -> None:
    small = replace(asleep("a"), want=PoolShape(200, 2), want_bytes=200)
    assert plan_seat(world(1000, small), want()) == Plan(
        (ClosePool("a"), OpenPool("a", PoolShape(200, 2)))
    )


def test_one_that_is_larger_than_wanted_only_wakes() -> None:
    large = replace(asleep("a"), want=PoolShape(50, 1), want_bytes=50)
    assert plan_seat(world(1000, large), want()) == Plan((WakePool("a"),))


def test_what_cannot_sleep_is_closed_and_unloaded() -> None:
    rigid = replace(pool("b", "x"), sleepable=False)
    there = world(150, closed("a"), weights("a", resident=False), rigid, weights("b", backed=False))
    assert plan_seat(there, want()) == Plan(
        (
            Drop("b", 0),
            ClosePool("b"),
            LoadWeights("a"),
            UnloadWeights("b"),
            OpenPool("a", ONE),
        )
    )


def test_weights_without_a_backup_go_with_their_sleeping_pools() -> None:
    there = world(150, asleep("a"), tired("a"), pool("b", "x"), weights("b", backed=False))
    plan = plan_seat(there, want())
    assert isinstance(plan, Plan)
    assert {ClosePool("b"), UnloadWeights("b")} <= set(plan.moves)
    assert SleepPool("b") not in plan.moves


def test_a_sleeping_pool_is_closed_where_only_its_scratch_is_missing() -> None:
    there = world(
        195,
        asleep("a"),
        weights("a", scratch_bytes=40),
        replace(asleep("b")),
        weights("b", scratch_bytes=10, resident=False, asleep=True),
    )
    assert there.resident_bytes() == 100
    assert plan_seat(there, want()) == Plan((ClosePool("b"), WakePool("a")))


def test_weights_that_are_read_may_sleep_and_are_not_unloaded() -> None:
    there = world(150, asleep("a"), tired("a"), pool("b", "x"), weights("b", pinned=True))
    assert isinstance(plan_seat(there, want()), Plan)
    stuck = weights("b", pinned=True, backed=False)
    there = world(150, asleep("a"), tired("a"), pool("b", "x"), stuck)
    assert plan_seat(there, want()) == Blocked("bytes", 150, 150)


def test_cheap_weights_sleep_before_a_dear_pool() -> None:
    def plan(kv_ms: float, room: int) -> set[object]:
        idle = replace(pool("b", "x"), kv_ms=kv_ms)
        there = world(room, asleep("a"), tired("a"), idle, weights("b", bytes=100))
        found = plan_seat(there, want())
        assert isinstance(found, Plan)
        return {move for move in found.moves if isinstance(move, GONE)}

    assert plan(kv_ms=1.0, room=250) == {SleepPool("b")}
    assert plan(kv_ms=50.0, room=250) == {SleepWeights("b")}
    assert plan(kv_ms=50.0, room=350) == set()


def test_weights_come_back_to_a_pool_that_stayed_awake() -> None:
    dear = pool("b", "x", kv_ms=50.0)
    there = world(250, pool("a", "me"), tired("a"), dear)
    assert plan_seat(there, want()) == Plan((SleepWeights("b"), WakeWeights("a")))
    full = world(250, dirty(pool("a", "other")), tired("a"), dear)
    assert plan_seat(full, want()) == Plan((SleepWeights("b"), WakeWeights("a"), Park("a", 0)))


def test_weights_do_not_sleep_under_a_job_that_runs() -> None:
    runs = replace(pool("b", "x"), busy=True, jobs=1)
    runs = replace(runs, slots=(replace(runs.slots[0], busy=True, clean=False),))
    there = world(210, asleep("a"), tired("a"), runs)
    plan = plan_seat(there, want())
    assert isinstance(plan, Plan)
    assert SleepPool("b") in plan.moves
    # Its weights alone would have been enough.
    plan = plan_seat(world(250, asleep("a"), tired("a"), runs), want())
    assert isinstance(plan, Plan)
    assert {move for move in plan.moves if isinstance(move, GONE)} == {SleepPool("b")}
    frozen = replace(runs, frozen=True)
    assert isinstance(plan_seat(world(210, asleep("a"), tired("a"), frozen), want()), Blocked)


def test_a_load_puts_idle_weights_to_sleep_and_unloads_none() -> None:
    there = world(60, closed("a"), weights("a", resident=False), closed("b"))
    assert plan_weights(there, "a") == Plan((SleepWeights("b"), LoadWeights("a")))
    working = world(60, closed("a"), weights("a", resident=False), weights("b", jobs=1))
    assert isinstance(plan_weights(working, "a"), Blocked)
    rigid = world(60, closed("a"), weights("a", resident=False), weights("b", backed=False))
    assert isinstance(plan_weights(rigid, "a"), Blocked)
    assert plan_weights(world(60, closed("a"), tired("a"), closed("b")), "a") == Plan()


def test_a_shrinking_budget_sends_everything_to_sleep() -> None:
    there = world(0, pool("a", "x"), pool("b"))
    plan = plan_shrink(there)
    assert follow(there, plan.moves).resident_bytes() == 0
    assert not any(isinstance(move, ClosePool | UnloadWeights) for move in plan.moves)
    scratchy = world(0, pool("a", "x"), weights("a", scratch_bytes=5))
    assert ClosePool("a") in plan_shrink(scratchy).moves


# --- any world ------------------------------------------------------------------------------------

sizes = st.integers(1, 60)


@st.composite
def any_weights(draw: st.DrawFn, model: str) -> WeightsView:
    state = draw(st.sampled_from(["resident", "asleep", "gone"]))
    return WeightsView(
        model,
        draw(sizes),
        scratch_bytes=draw(st.sampled_from([0, 0, 7, 30])),
        resident=state == "resident",
        asleep=state == "asleep",
        backed=state == "asleep" or (state == "resident" and draw(st.booleans())),
        owned=draw(st.booleans()),
        pinned=draw(st.integers(0, 4)) == 0,
        used_ns=draw(st.integers(0, 1000)),
        cost_ms=draw(st.floats(0, 100)),
        wake_ms=draw(st.floats(0, 20)),
    )


@st.composite
def any_pool(draw: st.DrawFn, key: str, mine: WeightsView) -> PoolView:
    loaded = mine.resident or mine.asleep
    is_open = loaded and draw(st.booleans())
    sleepable = draw(st.booleans())
    sleeps = is_open and sleepable and draw(st.booleans())
    runs = is_open and not sleeps and mine.resident
    slots: list[SlotView] = []
    for index in range(draw(st.integers(1, 3)) if is_open else 0):
        taken = not sleeps and draw(st.booleans())
        busy = taken and runs and draw(st.booleans())
        slots.append(
            SlotView(
                index,
                talk(f"{key}{index}") if taken else None,
                cells=draw(st.integers(1, 10)) if taken else 0,
                clean=not taken or (not busy and draw(st.booleans())),
                busy=busy,
                frozen=busy and draw(st.booleans()),
                used_ns=draw(st.integers(0, 1000)),
            )
        )
    busy = any(slot.busy for slot in slots)
    shape = PoolShape(draw(st.integers(30, 60)), len(slots)) if is_open else None
    return PoolView(
        key,
        mine.model,
        want=PoolShape(draw(st.integers(30, 60)), draw(st.integers(1, 3))),
        want_bytes=draw(sizes),
        shape=shape,
        open_bytes=draw(sizes) if is_open else 0,
        asleep=sleeps,
        sleepable=is_open and sleepable,
        jobs=draw(st.integers(0, 2)) + busy,
        busy=busy,
        frozen=(busy and any(slot.frozen for slot in slots)) or (runs and draw(st.booleans())),
        owned=mine.owned,
        used_ns=draw(st.integers(0, 1000)),
        cost_ms=draw(st.floats(0, 100)),
        wake_ms=draw(st.floats(0, 20)),
        kv_ms=draw(st.floats(0, 20)),
        slots=tuple(slots),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    models = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    found: dict[str, WeightsView] = {}
    pools: dict[str, PoolView] = {}
    for model in models:
        found[model] = draw(any_weights(model))
        for kv in draw(st.lists(st.sampled_from("xy"), min_size=1, unique=True)):
            pools[f"{model}@{kv}"] = draw(any_pool(f"{model}@{kv}", found[model]))
    there = World(1000, 0, draw(sizes), found, pools)
    return replace(there, budget_bytes=there.resident_bytes() + draw(st.integers(0, 120)))


def seat(there: World, data: st.DataObject) -> tuple[str, Plan | Blocked]:
    key = data.draw(st.sampled_from(sorted(there.pools)))
    view = there.pools[key]
    most = max(view.want.cells, view.shape.cells if view.shape else 0)
    return key, plan_seat(there, Want(key, talk("new"), data.draw(st.integers(1, most))))


@settings(max_examples=250)
@given(there=worlds(), data=st.data())
def test_every_plan_keeps_the_budget_and_what_is_frozen(there: World, data: st.DataObject) -> None:
    key, plan = seat(there, data)
    if isinstance(plan, Blocked):
        return
    replay = Replay(there)
    after = replay.follow(plan.moves)
    assert replay.peak_bytes <= there.budget_bytes
    assert after.pools[key].awake
    assert after.weights[after.pools[key].model].resident
    assert after.pools[key].slots[plan.slot].conversation is None
    for other, view in there.pools.items():
        if other != key and view.frozen:
            assert after.pools[other] == view
            assert after.weights[view.model] == there.weights[view.model]
    assert len(plan.moves) == len(set(plan.moves))


@settings(max_examples=150)
@given(there=worlds(), data=st.data())
def test_nothing_goes_while_there_is_room(there: World, data: st.DataObject) -> None:
    there = replace(there, budget_bytes=there.resident_bytes() + 300)
    key, plan = seat(there, data)
    assert not isinstance(plan, Blocked) or plan.reason in ("slots", "cells")
    if isinstance(plan, Plan):
        gone = [move for move in plan.moves if isinstance(move, GONE)]
        assert all(move == ClosePool(key) for move in gone)


@settings(max_examples=150)
@given(there=worlds(), data=st.data())
def test_it_is_blocked_only_where_nobody_could_do_it(there: World, data: st.DataObject) -> None:
    """For the most permissive rank: no subset of what may go would have been enough."""
    keep = data.draw(st.sampled_from(sorted(there.pools)))
    model = there.pools[keep].model
    deficit = data.draw(st.integers(1, 200))
    if choose(there, deficit, rank_all, keep_pool=keep, keep_model=model) is not None:
        return
    frozen = {view.model for view in there.pools.values() if view.frozen and view.awake}
    free = 0
    for view in there.pools.values():
        if view.key != keep and not view.frozen and view.shape is not None:
            free += view.open_bytes if view.awake else 0
            free += there.weights[view.model].scratch_bytes
    for item in there.weights.values():
        if item.resident and item.model != model and item.model not in frozen:
            free += item.bytes if item.backed or not item.pinned else 0
    assert free < deficit


@settings(max_examples=150)
@given(there=worlds(), budget=st.integers(0, 400))
def test_every_shrink_reaches_the_budget_or_frees_everything(there: World, budget: int) -> None:
    free = {}
    for key, view in there.pools.items():
        slots = tuple(replace(slot, frozen=False) for slot in view.slots)
        free[key] = replace(view, frozen=False, slots=slots)
    there = replace(there, pools=free, budget_bytes=budget)
    moves = plan_shrink(there).moves
    if there.resident_bytes() <= budget:
        assert not moves
    after = Replay(replace(there, budget_bytes=1 << 60)).follow(moves)
    stuck = [item for item in after.weights.values() if item.resident]
    if after.resident_bytes() > budget:
        assert all(item.pinned and not item.backed for item in stuck)
        assert not any(view.shape for view in after.pools.values() if view.awake)


@settings(max_examples=100)
@given(there=worlds(), data=st.data())
def test_no_victim_could_have_been_spared(there: World, data: st.DataObject) -> None:
    """What goes is needed: without any one of the pools or weights it would not be enough."""
    deficit = data.draw(st.integers(1, 200))
    chosen = choose(there, deficit, rank_all)
    if chosen is None:
        return
    assert chosen.bytes(there) >= deficit
    for model in chosen.weights:
        fewer = replace(
            chosen,
            weights_sleeping=chosen.weights_sleeping - {model},
            unloaded=chosen.unloaded - {model},
        )
        assert fewer.bytes(there) < deficit


def test_an_opening_at_registration_only_puts_idle_things_to_sleep() -> None:
    there = world(150, closed("a"), weights("a"), pool("b", "x"), tired("b"))
    assert plan_open(there, "a", gentle=True) == Plan(
        (Drop("b", 0), SleepPool("b"), OpenPool("a", ONE))
    )
    for other in (pool("b", "x", jobs=1), replace(pool("b", "x"), sleepable=False)):
        there = world(150, closed("a"), weights("a"), other, tired("b"))
        assert plan_open(there, "a", gentle=True) == Blocked("bytes", 150, 150)


def test_an_opening_at_registration_closes_no_pool_of_an_agent_for_its_scratch() -> None:
    there = world(
        150, closed("a"), weights("a"), pool("b", "x"), replace(tired("b"), scratch_bytes=7)
    )
    assert isinstance(plan_open(there, "a"), Plan)
    assert isinstance(plan_open(there, "a", gentle=True), Blocked)


@given(there=worlds(), data=st.data())
def test_a_gentle_opening_takes_nothing_from_any_agent_that_works(
    there: World, data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(there.pools)))
    plan = plan_open(there, key, gentle=True)
    if isinstance(plan, Blocked) or there.pools[key].busy:
        return
    after = follow(there, plan.moves)
    for other, view in there.pools.items():
        now = after.pools[other]
        if other != key and view.owned and now != view:
            assert now.asleep
            assert not view.jobs
    for model, item in there.weights.items():
        if item.owned and item.resident and after.weights[model] != item:
            assert after.weights[model].asleep
            assert not item.jobs
