"""The planner: nothing beyond the budget, nothing frozen, nothing in vain."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from plan_model import follow

from vram_conductor.protocol.values import ConversationKey, PoolShape
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
    SlotView,
    UnloadWeights,
    WeightsView,
    World,
)


def talk(name: str) -> ConversationKey:
    return ConversationKey("p", name, "main")


def slot(index: int, name: str = "", **fields: object) -> SlotView:
    view = SlotView(index, talk(name) if name else None)
    return replace(view, **fields)  # type: ignore[arg-type]


def pool(key: str, *slots: SlotView, size: int = 100, **fields: object) -> PoolView:
    model = key.partition("@")[0]
    shape = PoolShape(size, len(slots)) if slots else None
    view = PoolView(
        key,
        model,
        want=shape or PoolShape(size, 1),
        want_bytes=size,
        shape=shape,
        open_bytes=size if slots else 0,
        slots=slots,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def world(budget: int, *pools: PoolView, weights: dict[str, WeightsView] | None = None) -> World:
    found = {item.model: WeightsView(item.model, 50, resident=True) for item in pools}
    return World(1000, budget, 0, found | (weights or {}), {item.key: item for item in pools})


def want(key: str = "a", name: str = "me", cells: int = 10) -> Want:
    return Want(key, talk(name), cells)


def gone(model: str) -> dict[str, WeightsView]:
    return {model: WeightsView(model, 50)}


def test_a_conversation_gets_its_own_slot_then_a_free_one() -> None:
    there = world(1000, pool("a", slot(0, "other"), slot(1, "me", cells=5), slot(2)))
    assert plan_seat(there, want()) == Plan((), 1)
    assert plan_seat(there, want(name="new")) == Plan((), 2)


def test_the_longest_idle_conversation_makes_room() -> None:
    there = pool("a", slot(0, "x", used_ns=5), slot(1, "y", used_ns=3, clean=False))
    assert plan_seat(world(1000, there), want()) == Plan((Park("a", 1),), 1)
    older = pool("a", slot(0, "x", used_ns=2), slot(1, "y", used_ns=3, clean=False))
    assert plan_seat(world(1000, older), want()) == Plan((Drop("a", 0),), 0)


def test_idle_conversations_leave_until_the_cells_suffice() -> None:
    there = pool("a", slot(0, "x", cells=60, used_ns=1), slot(1, "y", cells=30, used_ns=2), slot(2))
    assert plan_seat(world(1000, there), want(cells=10)) == Plan((), 2)
    assert plan_seat(world(1000, there), want(cells=11)) == Plan((Drop("a", 0),), 2)
    assert plan_seat(world(1000, there), want(cells=71)) == Plan((Drop("a", 0), Drop("a", 1)), 2)


def test_running_jobs_are_preempted_last_and_frozen_ones_never() -> None:
    there = pool(
        "a",
        slot(0, "x", busy=True, clean=False, order=(0, -1)),
        slot(1, "y", busy=True, clean=False, order=(0, -2)),
    )
    assert plan_seat(world(1000, there), want()) == Plan((Park("a", 1),), 1)
    frozen = replace(there, slots=tuple(replace(item, frozen=True) for item in there.slots))
    assert plan_seat(world(1000, frozen), want()) == Blocked("slots")
    full = pool("a", slot(0, "x", busy=True, frozen=True, cells=95), slot(1))
    assert plan_seat(world(1000, full), want()) == Blocked("cells")


def test_a_closed_pool_opens_beside_what_is_there_if_it_fits() -> None:
    there = world(300, pool("a"), pool("b", slot(0, "x")))
    assert plan_seat(there, want()) == Plan((OpenPool("a", PoolShape(100, 1)),))
    cold = world(300, pool("a"), pool("b", slot(0, "x")), weights=gone("a"))
    assert plan_seat(cold, want()) == Plan((LoadWeights("a"), OpenPool("a", PoolShape(100, 1))))


def test_pools_make_room_before_weights_do() -> None:
    there = world(299, pool("a"), pool("b", slot(0, "x", clean=False)))
    assert plan_seat(there, want()) == Plan(
        (Park("b", 0), ClosePool("b"), OpenPool("a", PoolShape(100, 1)))
    )
    tight = world(199, pool("a"), pool("b", slot(0, "x")))
    assert plan_seat(tight, want()) == Plan(
        (
            Drop("b", 0),
            ClosePool("b"),
            UnloadWeights("b"),
            OpenPool("a", PoolShape(100, 1)),
        )
    )


def test_weights_stay_where_all_of_them_fit_beside_the_pool() -> None:
    frozen = pool("b", slot(0, "x"), jobs=1, frozen=True)
    there = world(300, pool("a"), frozen, pool("c"))
    # Unloading c would make room at once; but waiting for b's turn costs nobody a reload.
    assert plan_seat(there, want()) == Blocked("bytes", 150, 300)
    assert isinstance(plan_seat(world(349, pool("a"), frozen, pool("c")), want()), Blocked)


def test_it_is_said_when_it_would_not_fit_even_alone() -> None:
    assert plan_seat(world(149, pool("a")), want()) == Blocked("budget", 150, 149)


def test_the_cheapest_and_longest_idle_goes_first() -> None:
    def left(cost_b: float, used_b: int) -> set[str]:
        there = world(
            450,
            pool("a"),
            pool("b", slot(0), cost_ms=cost_b, used_ns=used_b),
            pool("c", slot(0), cost_ms=10.0, used_ns=500),
            pool("d", size=0),
        )
        plan = plan_seat(replace(there, now_ns=10**9), want())
        assert isinstance(plan, Plan)
        return {move.pool for move in plan.moves if isinstance(move, ClosePool)}

    assert left(cost_b=20.0, used_b=500) == {"c"}
    assert left(cost_b=5.0, used_b=500) == {"b"}
    assert left(cost_b=10.0, used_b=9 * 10**8) == {"c"}


def test_no_more_goes_than_is_needed() -> None:
    there = world(
        400,
        pool("a", size=100),
        pool("b", slot(0), size=10, cost_ms=1.0),
        pool("c", slot(0), size=100, cost_ms=50.0),
        pool("d", slot(0), size=60, cost_ms=90.0),
    )
    plan = plan_seat(there, want())
    assert isinstance(plan, Plan)
    assert [move for move in plan.moves if isinstance(move, ClosePool)] == [ClosePool("c")]


def test_what_no_agent_owns_goes_before_anything_else() -> None:
    there = world(
        400, pool("a"), pool("b", slot(0)), pool("c", slot(0), owned=False, cost_ms=999.0)
    )
    plan = plan_seat(there, want())
    assert isinstance(plan, Plan)
    assert ClosePool("c") in plan.moves
    assert ClosePool("b") not in plan.moves


def test_a_pool_grows_by_reopening_and_only_when_it_must() -> None:
    running = slot(0, "x", busy=True, frozen=True, cells=90, clean=False)
    there = pool("a", running, want=PoolShape(200, 2), want_bytes=200)
    assert plan_seat(world(1000, there), want(cells=50)) == Plan(
        (Park("a", 0), ClosePool("a"), OpenPool("a", PoolShape(200, 2)))
    )
    # It would not help: the frozen job and this one do not fit together.
    assert plan_seat(world(1000, there), want(cells=150)) == Blocked("slots")
    idle = pool("a", slot(0, "x", cells=90), want=PoolShape(200, 2), want_bytes=200)
    assert plan_seat(world(1000, idle), want(cells=50)) == Plan((Drop("a", 0),), 0)
    assert plan_seat(world(250, idle), want(cells=150)) == Plan(
        (Drop("a", 0), ClosePool("a"), OpenPool("a", PoolShape(200, 2)))
    )


def test_a_load_takes_nothing_from_anybody_who_has_work() -> None:
    busy = pool("b", slot(0, "x"), jobs=1)
    assert isinstance(plan_weights(world(150, pool("a"), busy, weights=gone("a")), "a"), Blocked)
    idle = pool("b", slot(0, "x"))
    assert plan_weights(world(150, pool("a"), idle, weights=gone("a")), "a") == Plan(
        (Drop("b", 0), ClosePool("b"), LoadWeights("a"))
    )
    assert isinstance(plan_open(world(250, pool("a"), idle), "a", gentle=True), Blocked)
    assert isinstance(plan_open(world(300, pool("a"), idle), "a", gentle=True), Plan)


def test_a_shrinking_budget_takes_idle_pools_first_and_all_if_it_must() -> None:
    there = world(300, pool("a", slot(0, "x", busy=True), jobs=1, busy=True), pool("b", slot(0)))
    assert plan_shrink(there) == Plan()
    assert plan_shrink(replace(there, budget_bytes=299)) == Plan((ClosePool("b"),))
    assert ClosePool("a") in plan_shrink(replace(there, budget_bytes=199)).moves
    assert len(plan_shrink(replace(there, budget_bytes=0)).moves) == 5


# --- any world ------------------------------------------------------------------------------------

sizes = st.integers(1, 60)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    models = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    weights: dict[str, WeightsView] = {}
    pools: dict[str, PoolView] = {}
    for model in models:
        weights[model] = WeightsView(
            model,
            draw(sizes),
            resident=draw(st.booleans()),
            owned=draw(st.booleans()),
            used_ns=draw(st.integers(0, 1000)),
            cost_ms=draw(st.floats(0, 100)),
        )
        for kv in draw(st.lists(st.sampled_from("xy"), min_size=1, unique=True)):
            resident = weights[model].resident and draw(st.booleans())
            cells = draw(sizes)
            slots = tuple(
                slot(
                    index,
                    draw(st.sampled_from(["", f"{model}{kv}{index}"])),
                    clean=draw(st.booleans()),
                )
                for index in range(draw(st.integers(1, 3)) if resident else 0)
            )
            pools[f"{model}@{kv}"] = replace(
                pool(f"{model}@{kv}", *slots, size=cells),
                want=PoolShape(draw(sizes), draw(st.integers(1, 3))),
                want_bytes=draw(sizes),
                frozen=draw(st.booleans()),
                owned=weights[model].owned,
                jobs=draw(st.integers(0, 2)),
                cost_ms=draw(st.floats(0, 100)),
            )
    found = World(1000, 0, draw(sizes), weights, pools)
    more = draw(st.integers(0, 120))
    return replace(found, budget_bytes=found.resident_bytes() + more)


@given(there=worlds(), data=st.data())
def test_every_plan_stays_within_the_budget_and_leaves_frozen_pools_alone(
    there: World, data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from(sorted(there.pools)))
    cells = data.draw(st.integers(1, there.pools[key].want.cells))
    plan = plan_seat(there, Want(key, talk("new"), cells))
    if isinstance(plan, Blocked):
        return
    after = follow(there, plan.moves)
    assert after.pools[key].shape
    for other, view in there.pools.items():
        if other != key and view.frozen:
            assert after.pools[other] == view
    fits = there.resident_bytes() + there.pools[key].want_bytes + 60 <= there.budget_bytes
    if fits and not there.pools[key].shape:
        assert not any(isinstance(move, ClosePool | UnloadWeights) for move in plan.moves)


@given(there=worlds(), budget=st.integers(0, 400))
def test_every_shrink_reaches_the_budget_or_frees_everything(there: World, budget: int) -> None:
    free = {key: replace(view, frozen=False) for key, view in there.pools.items()}
    there = replace(there, pools=free)
    moves = plan_shrink(replace(there, budget_bytes=budget)).moves
    after = follow(there, moves)
    assert after.resident_bytes() <= max(budget, there.base_bytes)
