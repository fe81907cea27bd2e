"""The cap, the promise and the shapes, with the numbers spelled out. Sizes in MiB."""

from __future__ import annotations

import pytest
from ledger_cases import MIB, NOW, agent, lines, make_claim, make_ledger, refuse, reserve

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Admit, DenyCode, Reservation, Stale
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.ledger.ordered import Peaks
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import PoolShape

# --- the cap ---


@pytest.mark.parametrize(
    ("total", "reserved", "capacity", "percent", "cap"),
    [
        (1000, 0, 0, 100, 1000),
        (1000, 100, 0, 90, 810),
        (1000, 100, 500, 90, 450),
        (1000, 100, 5000, 100, 900),
        (7, 0, 0, 50, 3),
        (5, 9, 0, 100, 0),
    ],
)
def test_the_cap_is_what_the_driver_leaves_times_the_percentage(
    total: int, reserved: int, capacity: int, percent: int, cap: int
) -> None:
    spec = DeviceSpec("cuda:0", "cuda", "reserve", total, reserved, capacity, percent)
    assert spec.cap_bytes == cap


def test_a_claim_fits_to_the_byte() -> None:
    exact = make_ledger(300)
    assert isinstance(exact.reserve(make_claim(exact, "a"), NOW), Reservation)
    spec = DeviceSpec("cpu", "cpu", "reserve", 300 * MIB - 1, host_cap_bytes=10 * MIB)
    short = Ledger(spec)
    short.observe(0, NOW)
    denied = refuse(short, make_claim(short, "a"))
    assert (denied.code, denied.short_by_bytes, denied.never) == (DenyCode.CAP, 1, True)


# --- one registration after another ---


def test_the_second_registration_sees_what_the_first_was_promised_before_it_loads() -> None:
    ledger = make_ledger(700)
    first = reserve(ledger, make_claim(ledger, "a", "m1", weights=400, pool=100))
    assert first.requested_bytes == 500 * MIB
    # Nothing is loaded and nothing measured; 500 of 700 are taken all the same.
    denied = refuse(ledger, make_claim(ledger, "b", "m2", weights=250, pool=50))
    assert denied.code is DenyCode.CAP
    assert denied.ledger_allocated_bytes == 500 * MIB
    assert denied.requested_bytes == 250 * MIB  # the pools take turns: max(100, 50)
    assert denied.ledger_max_bytes == 700 * MIB
    assert denied.short_by_bytes == 50 * MIB
    assert not denied.never
    assert {line.key for line in denied.lines} == {"weights:m1", "pool:m1@f16"}
    assert ledger.rollback(first)
    reserve(ledger, make_claim(ledger, "b", "m2", weights=250, pool=50))


def test_two_agents_of_one_model_hold_its_weights_once() -> None:
    ledger = make_ledger()
    for name in ("a", "b"):
        ledger.commit(reserve(ledger, make_claim(ledger, name)))
    assert ledger.promised_bytes == 300 * MIB
    assert ledger.release(agent("a"))
    assert lines(ledger) == {"weights:m": 200, "pool:m@f16": 100}
    assert ledger.release(agent("b"))
    assert ledger.lines() == ()
    assert ledger.promised_bytes == 0


def test_reserve_mode_keeps_all_weights_and_the_largest_pool() -> None:
    ledger = make_ledger()
    ledger.set_base(30 * MIB)
    reserve(ledger, make_claim(ledger, "a", "m1", weights=200, pool=100))
    reserve(ledger, make_claim(ledger, "b", "m2", weights=150, pool=250))
    assert ledger.promised_bytes == (30 + 200 + 150 + 250) * MIB
    reserve(ledger, make_claim(ledger, "c", "m2", weights=150, pool=60, kv_type="q8_0"))
    assert ledger.promised_bytes == (30 + 200 + 150 + 250) * MIB


def test_timeshare_mode_keeps_the_largest_model_with_its_pool() -> None:
    ledger = make_ledger(cap=500, mode="timeshare")
    for model, weights, pool in (("m1", 300, 100), ("m2", 200, 290), ("m3", 450, 50)):
        claim = make_claim(ledger, model, model, weights=weights, pool=pool)
        reserve(ledger, claim)
    assert ledger.promised_bytes == 500 * MIB  # 950 MiB of weights on 500
    denied = refuse(ledger, make_claim(ledger, "d", "m4", weights=400, pool=101))
    assert denied.requested_bytes == 1 * MIB


def test_a_changed_mode_counts_anew() -> None:
    ledger = make_ledger(cap=1000)
    reserve(ledger, make_claim(ledger, "a", "m1", weights=300, pool=100))
    reserve(ledger, make_claim(ledger, "b", "m2", weights=200, pool=250))
    assert ledger.promised_bytes == 750 * MIB
    spec = DeviceSpec("cpu", "cpu", "timeshare", 1000 * MIB)
    ledger.reconfigure(spec)
    assert ledger.promised_bytes == 450 * MIB
    ledger.validate_state()
    with pytest.raises(InvalidArgument):
        ledger.reconfigure(DeviceSpec("cpu:1", "cpu", "timeshare", 1))


# --- shapes ---


def test_the_requested_context_counts_and_not_the_one_of_the_training() -> None:
    ledger = make_ledger()
    shape = ledger.shape_with("m", "f16", agent("a"), 1000, 1)
    assert shape == PoolShape(1024, 1, "f16")
    with pytest.raises(InvalidArgument, match="cannot hold"):
        Claim(agent("a"), "m", "f16", 1025, 1, shape, 1, 1)


def test_cells_are_the_sum_of_the_largest_contexts_that_may_be_there_at_once() -> None:
    ledger = make_ledger(cap=100_000, host=100_000)
    shapes: list[tuple[int, int]] = []
    for name, n_ctx, slots in (("a", 1000, 1), ("b", 3000, 1), ("c", 2000, 2), ("d", 500, 2)):
        claim = make_claim(ledger, name, n_ctx=n_ctx, slots=slots, pool=n_ctx)
        shapes.append((claim.shape.cells, claim.shape.slots))
        reserve(ledger, claim)
    assert shapes == [(1024, 1), (3072, 1), (3072 + 2048, 2), (3072 + 2048, 2)]
    for name, shape in (("d", (3072 + 2048, 2)), ("c", (3072, 1)), ("b", (1024, 1))):
        assert ledger.release(agent(name))
        pool = ledger.pool("m", "f16")
        assert pool is not None
        assert (pool.shape.cells, pool.shape.slots) == shape
    assert ledger.release(agent("a"))
    assert ledger.pool("m", "f16") is None


def test_an_estimate_for_an_older_shape_is_stale_and_takes_nothing() -> None:
    ledger = make_ledger()
    early = make_claim(ledger, "a", n_ctx=1024, slots=2)
    reserve(ledger, make_claim(ledger, "b", n_ctx=512, slots=1))
    before = (ledger.lines(), ledger.totals())
    answer = ledger.reserve(early, NOW)
    assert answer == Stale("cpu", PoolShape(1024 + 512, 2, "f16"))
    assert (ledger.lines(), ledger.totals()) == before
    reserve(ledger, make_claim(ledger, "a", n_ctx=1024, slots=2))


def test_an_unregistered_agent_shrinks_the_pool_to_a_size_that_was_seen() -> None:
    ledger = make_ledger()
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=40)))
    ledger.commit(reserve(ledger, make_claim(ledger, "b", n_ctx=4096, pool=90)))
    assert lines(ledger)["pool:m@f16"] == 90
    ledger.release(agent("b"))
    assert lines(ledger)["pool:m@f16"] == 40


def test_a_shape_that_was_never_estimated_keeps_the_next_larger_size() -> None:
    ledger = make_ledger()
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=4096, pool=90)))
    ledger.commit(reserve(ledger, make_claim(ledger, "b", n_ctx=1024, pool=90)))
    ledger.release(agent("a"))
    pool = ledger.pool("m", "f16")
    assert pool is not None
    assert (pool.shape.cells, pool.bytes, pool.unmeasured) == (1024, 90 * MIB, True)
    # The next estimate of that shape tells better.
    reserve(ledger, make_claim(ledger, "c", n_ctx=1024, pool=40))
    assert lines(ledger)["pool:m@f16"] == 40


def test_a_rollback_restores_a_bounded_pool() -> None:
    ledger = make_ledger()
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=4096, pool=90)))
    ledger.commit(reserve(ledger, make_claim(ledger, "b", n_ctx=1024, pool=90)))
    ledger.release(agent("a"))
    before = (ledger.lines(), ledger.totals())
    held = reserve(ledger, make_claim(ledger, "c", n_ctx=1024, pool=40))
    assert (ledger.lines(), ledger.totals()) != before
    assert ledger.rollback(held)
    assert (ledger.lines(), ledger.totals()) == before


def test_a_rollback_never_pushes_the_ledger_over_its_cap() -> None:
    ledger = make_ledger(300)
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=4096, pool=90)))
    ledger.commit(reserve(ledger, make_claim(ledger, "b", n_ctx=1024, pool=90)))
    ledger.release(agent("a"))
    held = reserve(ledger, make_claim(ledger, "c", n_ctx=1024, pool=40))
    # Room for the other model is there only because the estimate is better now.
    reserve(ledger, make_claim(ledger, "d", "other", weights=60, pool=40))
    assert ledger.promised_bytes == 300 * MIB
    assert ledger.rollback(held)
    assert ledger.promised_bytes == 300 * MIB
    ledger.validate_state()


def test_a_pool_that_saw_very_many_shapes_stays_small_and_exact() -> None:
    ledger = make_ledger(cap=10_000, host=10_000)
    ledger.commit(reserve(ledger, make_claim(ledger, "stays", n_ctx=256, pool=1)))
    for step in range(2, 300):
        claim = make_claim(ledger, "guest", n_ctx=256 * step, pool=step)
        ledger.commit(reserve(ledger, claim))
        assert lines(ledger)["pool:m@f16"] == step
        before = ledger.promised_bytes
        ledger.release(agent("guest"))
        assert ledger.promised_bytes <= before
        ledger.validate_state()
    assert lines(ledger)["pool:m@f16"] == 1
    pool = ledger._book.pool("m@f16")
    assert pool is not None
    assert len(pool._figures) <= 64


def test_forgetting_old_shapes_never_makes_a_pool_larger() -> None:
    ledger = make_ledger(cap=100_000, host=100_000)
    ledger.commit(reserve(ledger, make_claim(ledger, "leaves", n_ctx=4096, pool=90)))
    ledger.commit(reserve(ledger, make_claim(ledger, "stays", n_ctx=1024, pool=90)))
    ledger.release(agent("leaves"))
    for step in range(1, 200):
        claim = make_claim(ledger, "guest", n_ctx=4096 + 256 * step, pool=90 + step)
        ledger.commit(reserve(ledger, claim))
        ledger.release(agent("guest"))
        assert lines(ledger)["pool:m@f16"] == 90


def test_two_kv_types_of_one_model_share_its_weights_and_take_turns() -> None:
    ledger = make_ledger(cap=400, mode="timeshare")
    reserve(ledger, make_claim(ledger, "a", weights=200, pool=150))
    second = make_claim(ledger, "b", weights=200, pool=100, kv_type="q8_0")
    assert ledger.fit_bytes(second) == 200 * MIB
    reserve(ledger, second)
    assert ledger.promised_bytes == 350 * MIB
    # Larger weights than the first was told: both pools stand on them.
    third = make_claim(ledger, "c", weights=251, pool=100, kv_type="q8_0")
    assert ledger.fit_bytes(third) == 0
    assert refuse(ledger, third).short_by_bytes == 1 * MIB
    assert ledger.fit_bytes(make_claim(ledger, "c", weights=250, pool=1, kv_type="q8_0")) == (
        150 * MIB
    )


def test_a_larger_shape_never_counts_less_than_one_inside_it() -> None:
    ledger = make_ledger(280)
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=80)))
    # An estimator that contradicts itself: twice the cells in less memory.
    odd = make_claim(ledger, "b", n_ctx=2048, pool=50)
    assert ledger.decide(odd, NOW) == Admit("cpu", 0, 0, shares_weights=True)
    reserve(ledger, odd)
    assert lines(ledger)["pool:m@f16"] == 80


def test_shapes_are_not_forgotten_under_a_load_in_progress() -> None:
    ledger = make_ledger(cap=100_000, host=100_000)
    ledger.commit(reserve(ledger, make_claim(ledger, "stays", n_ctx=256, pool=1)))
    first = reserve(ledger, make_claim(ledger, "slow", n_ctx=512, pool=2))
    for step in range(3, 200):
        claim = make_claim(ledger, "guest", n_ctx=256 * step, pool=step)
        ledger.commit(reserve(ledger, claim))
        ledger.release(agent("guest"))
    assert lines(ledger)["pool:m@f16"] == 2
    assert ledger.rollback(first)
    assert lines(ledger)["pool:m@f16"] == 1


def test_never_means_not_even_on_the_empty_device() -> None:
    ledger = make_ledger(1000)
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=100)))
    ledger.commit(reserve(ledger, make_claim(ledger, "b", n_ctx=2048, pool=150)))
    late = make_claim(ledger, "c", n_ctx=1024, pool=150)
    for cap, never in ((349, False), (300, False), (299, True)):
        ledger.reconfigure(DeviceSpec("cpu", "cpu", "reserve", cap * MIB, host_cap_bytes=MIB))
        denied = refuse(ledger, late)
        assert (denied.code, denied.never) == (DenyCode.CAP, never)


def test_the_largest_of_the_others() -> None:
    peaks = Peaks()
    for name, size in (("a", 3), ("b", 2), ("c", 1)):
        peaks.put(name, size)
    assert peaks.top == 3
    assert peaks.top_without({"a"}) == 2
    assert peaks.top_without({"a", "b"}) == 1
    assert peaks.top_without({"a", "b", "c", "x"}) == 0
    peaks.put("c", 9)
    assert (peaks.top, peaks.top_without(("c",))) == (9, 3)
    peaks.drop("c")
    peaks.drop("c")
    assert peaks.top == 3
