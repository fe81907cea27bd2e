"""One device's ledger, with the numbers spelled out. Sizes are in MiB unless they say bytes."""

from __future__ import annotations

import pytest

from vram_conductor.broker.capacity import DeviceSpec
from vram_conductor.broker.claims import Claim, Measured
from vram_conductor.broker.decisions import Admit, Committed, Deny, DenyCode, Reservation, Stale
from vram_conductor.broker.ledger import Ledger
from vram_conductor.protocol.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from vram_conductor.protocol.limits import BYTES_MAX, N_CTX_MAX, SLOTS_MAX
from vram_conductor.protocol.values import AgentKey, KVType, LedgerMode, PoolShape

MIB = 1 << 20
NOW = 1_000_000_000


def agent(name: str) -> AgentKey:
    return AgentKey("local", name)


def make_ledger(cap: int = 1000, mode: LedgerMode = "reserve", host: int = 1000) -> Ledger:
    spec = DeviceSpec("cpu", "cpu", mode, cap * MIB, host_cap_bytes=host * MIB)
    ledger = Ledger(spec)
    ledger.observe(0, NOW)
    return ledger


def make_claim(
    ledger: Ledger,
    name: str,
    model: str = "m",
    *,
    weights: int = 200,
    pool: int = 100,
    n_ctx: int = 1024,
    slots: int = 1,
    kv_type: KVType = "f16",
    state: int = 10,
) -> Claim:
    """A claim with an estimate for the shape that the ledger asks for."""
    shape = ledger.shape_with(model, kv_type, agent(name), n_ctx, slots)
    return Claim(
        agent=agent(name),
        model=model,
        kv_type=kv_type,
        n_ctx=n_ctx,
        slots=slots,
        shape=shape,
        weights_bytes=weights * MIB,
        pool_bytes=pool * MIB,
        state_bytes=state * MIB,
    )


def reserve(ledger: Ledger, claim: Claim) -> Reservation:
    answer = ledger.reserve(claim, NOW)
    assert isinstance(answer, Reservation), answer
    return answer


def refuse(ledger: Ledger, claim: Claim, now_ns: int = NOW) -> Deny:
    answer = ledger.reserve(claim, now_ns)
    assert isinstance(answer, Deny), answer
    return answer


def lines(ledger: Ledger) -> dict[str, int]:
    return {line.key: line.bytes // MIB for line in ledger.lines()}


# --- the cap ----------------------------------------------------------------------------------


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


# --- one registration after another -----------------------------------------------------------


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


# --- shapes -----------------------------------------------------------------------------------


def test_the_requested_context_counts_and_not_the_one_of_the_training() -> None:
    ledger = make_ledger()
    shape = ledger.shape_with("m", "f16", agent("a"), 1000, 1)
    assert shape == PoolShape(1024, 1, "f16")
    with pytest.raises(InvalidArgument, match="cannot hold"):
        Claim(agent("a"), "m", "f16", 1025, 1, shape, 1, 1)


def test_cells_are_the_sum_of_the_largest_contexts_that_may_be_there_at_once() -> None:
    ledger = make_ledger(cap=100_000, host=100_000)
    shapes = []
    for name, n_ctx, slots in (("a", 1000, 1), ("b", 3000, 1), ("c", 2000, 2), ("d", 500, 2)):
        claim = make_claim(ledger, name, n_ctx=n_ctx, slots=slots, pool=n_ctx)
        shapes.append((claim.shape.cells, claim.shape.slots))
        reserve(ledger, claim)
    assert shapes == [(1024, 1), (3072, 1), (3072 + 2048, 2), (3072 + 2048, 2)]
    assert ledger.shape_without(agent("b")) == PoolShape(2048 + 1024, 2, "f16")
    assert ledger.shape_without(agent("d")) == PoolShape(3072 + 2048, 2, "f16")
    assert ledger.release(agent("d"))
    assert ledger.shape_without(agent("c")) == PoolShape(3072, 1, "f16")
    assert ledger.shape_without(agent("nobody")) is None


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


# --- commit, measure, roll back ---------------------------------------------------------------


def test_claims_are_reconciled_with_what_was_measured() -> None:
    ledger = make_ledger()
    held = reserve(ledger, make_claim(ledger, "embedder", weights=500, pool=400))
    assert ledger.promised_bytes == 900 * MIB
    measured = Measured(480 * MIB, 20 * MIB, 5 * MIB)
    done = ledger.commit(held, measured)
    assert done == Committed(agent("embedder"), 505 * MIB, unmeasured=False)
    assert lines(ledger) == {"weights:m": 480, "scratch:m": 5, "pool:m@f16": 20}
    # A second agent of the same model and shape is counted by the measurement.
    again = ledger.decide(make_claim(ledger, "b", weights=500, pool=400), NOW)
    assert again == Admit("cpu", 0, 495 * MIB, shares_weights=True)


def test_what_was_not_allocated_yet_is_flagged_until_it_is_measured() -> None:
    ledger = make_ledger()
    held = reserve(ledger, make_claim(ledger, "a"))
    done = ledger.commit(held, Measured(weights_bytes=210 * MIB))
    assert done == Committed(agent("a"), 310 * MIB, unmeasured=True)
    flags = {line.key: line.unmeasured for line in ledger.lines()}
    assert flags == {"weights:m": False, "pool:m@f16": True}
    assert ledger.measured("m", Measured(pool_bytes=95 * MIB), held.claim.shape) is None
    flags = {line.key: line.unmeasured for line in ledger.lines()}
    assert flags == {"weights:m": False, "pool:m@f16": False}
    assert ledger.promised_bytes == 305 * MIB
    assert not ledger.is_unmeasured(agent("a"))


def test_a_load_larger_than_its_estimate_is_checked_again() -> None:
    ledger = make_ledger(400)
    other = reserve(ledger, make_claim(ledger, "other", "n", weights=50, pool=10))
    before = (ledger.lines(), ledger.host_lines(), ledger.totals())
    held = reserve(ledger, make_claim(ledger, "a", weights=200, pool=100))
    denied = ledger.commit(held, Measured(251 * MIB, 100 * MIB))
    assert isinstance(denied, Deny)
    assert denied.code is DenyCode.MEASURED
    assert denied.ledger_allocated_bytes == 60 * MIB
    assert denied.requested_bytes == (251 + 100 - 10) * MIB
    assert denied.short_by_bytes == 1 * MIB
    assert (ledger.lines(), ledger.host_lines(), ledger.totals()) == before
    assert ledger.rollback(held) is False
    assert isinstance(ledger.commit(other, Measured(60 * MIB, 10 * MIB)), Committed)
    again = reserve(ledger, make_claim(ledger, "a", weights=200, pool=100))
    assert isinstance(ledger.commit(again, Measured(240 * MIB, 100 * MIB)), Committed)
    assert ledger.promised_bytes == 400 * MIB


def test_a_late_surprise_leaves_the_lines_as_they_were() -> None:
    ledger = make_ledger(300)
    held = reserve(ledger, make_claim(ledger, "a", weights=200, pool=100))
    ledger.commit(held, Measured(weights_bytes=200 * MIB))
    before = (ledger.lines(), ledger.totals())
    denied = ledger.measured("m", Measured(pool_bytes=101 * MIB), held.claim.shape)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.short_by_bytes) == (DenyCode.MEASURED, 1 * MIB)
    assert (ledger.lines(), ledger.totals()) == before
    unseen = PoolShape(8192, 4, "f16")
    assert ledger.measured("m", Measured(scratch_bytes=1), unseen) is not None
    assert (ledger.lines(), ledger.totals()) == before
    assert ledger.measured("gone", Measured(weights_bytes=1)) is None
    with pytest.raises(InvalidArgument, match="of which shape"):
        ledger.measured("m", Measured(pool_bytes=1))


def test_a_measured_pool_corrects_the_estimates_inside_it() -> None:
    ledger = make_ledger()
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=80)))
    held = reserve(ledger, make_claim(ledger, "b", n_ctx=2048, pool=100))
    ledger.commit(held, Measured(pool_bytes=50 * MIB))
    assert lines(ledger)["pool:m@f16"] == 50
    ledger.release(agent("b"))
    assert lines(ledger)["pool:m@f16"] == 50  # not 80: a part is not larger than the whole


def test_a_failed_load_leaves_no_trace() -> None:
    ledger = make_ledger()
    ledger.commit(reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=40)))
    before = (ledger.lines(), ledger.host_lines(), ledger.totals(), list(ledger.agents()))
    held = reserve(ledger, make_claim(ledger, "b", n_ctx=9000, pool=300, slots=3, state=99))
    assert ledger.rollback(held) is True
    after = (ledger.lines(), ledger.host_lines(), ledger.totals(), list(ledger.agents()))
    assert after == before
    assert ledger.rollback(held) is False
    with pytest.raises(FailedPrecondition, match="reserve again"):
        ledger.commit(held)
    assert after == (ledger.lines(), ledger.host_lines(), ledger.totals(), list(ledger.agents()))


def test_reservations_overlap_and_end_in_any_order() -> None:
    ledger = make_ledger()
    first = reserve(ledger, make_claim(ledger, "a", n_ctx=2048, pool=70))
    second = reserve(ledger, make_claim(ledger, "b", n_ctx=1024, slots=2, pool=100))
    third = reserve(ledger, make_claim(ledger, "c", "n", weights=80, pool=20))
    assert ledger.promised_bytes == (200 + 80 + 100) * MIB
    ledger.commit(second, Measured(205 * MIB, 101 * MIB))
    assert ledger.promised_bytes == (205 + 80 + 101) * MIB
    ledger.rollback(first)
    # b alone was never estimated: it keeps what holds it.
    assert lines(ledger) == {"weights:m": 205, "weights:n": 80, "pool:m@f16": 101, "pool:n@f16": 20}
    ledger.rollback(third)
    assert lines(ledger) == {"weights:m": 205, "pool:m@f16": 101}
    assert ledger.release(agent("b"))
    assert ledger.lines() == ()


def test_leaving_during_a_load_ends_its_reservation() -> None:
    ledger = make_ledger()
    held = reserve(ledger, make_claim(ledger, "a"))
    assert ledger.release(agent("a")) is True
    assert ledger.release(agent("a")) is False
    with pytest.raises(FailedPrecondition):
        ledger.commit(held)
    fresh = reserve(ledger, make_claim(ledger, "a", "n"))
    assert ledger.rollback(held) is False  # an old reservation cannot end a new one
    assert ledger.claim_of(agent("a")) == fresh.claim


def test_a_reservation_belongs_to_one_ledger() -> None:
    ledger, other = make_ledger(), Ledger(DeviceSpec("cpu:1", "cpu", "reserve", 1000 * MIB))
    other.observe(0, NOW)
    held = reserve(ledger, make_claim(ledger, "a"))
    reserve(other, make_claim(other, "b", state=0))
    assert other.rollback(held) is False
    with pytest.raises(FailedPrecondition):
        other.commit(held)


def test_an_agent_is_in_a_ledger_once() -> None:
    ledger = make_ledger()
    claim = make_claim(ledger, "a")
    reserve(ledger, claim)
    for ask in (ledger.reserve, ledger.decide):
        with pytest.raises(AlreadyExists, match="already"):
            ask(claim, NOW)
    with pytest.raises(AlreadyExists):
        ledger.shape_with("m", "f16", agent("a"), 1024, 1)


# --- what others use --------------------------------------------------------------------------


def test_a_foreign_program_comes_and_goes() -> None:
    ledger = make_ledger(1000)
    ledger.commit(reserve(ledger, make_claim(ledger, "a", weights=400, pool=100)))
    ledger.observe(300 * MIB, NOW)
    assert ledger.budget_bytes == 700 * MIB
    denied = refuse(ledger, make_claim(ledger, "b", "n", weights=201, pool=100))
    assert (denied.code, denied.foreign_bytes) == (DenyCode.CAP, 300 * MIB)
    assert (denied.short_by_bytes, denied.never) == (1 * MIB, False)
    # It grows beyond what was left: the promise stays, nothing is admitted, not even 0 bytes.
    ledger.observe(600 * MIB, NOW + 1)
    totals = ledger.totals()
    assert (totals.over_bytes, totals.free_bytes, totals.budget_bytes) == (
        100 * MIB,
        0,
        400 * MIB,
    )
    free = make_claim(ledger, "c", weights=400, pool=100)
    denied = refuse(ledger, free)
    assert (denied.requested_bytes, denied.short_by_bytes) == (0, 100 * MIB)
    ledger.observe(0, NOW + 2)
    assert ledger.totals().over_bytes == 0
    reserve(ledger, free)
    reserve(ledger, make_claim(ledger, "b", "n", weights=201, pool=100))


def test_foreign_growth_during_a_load_does_not_undo_a_load_that_kept_its_word() -> None:
    ledger = make_ledger(400)
    held = reserve(ledger, make_claim(ledger, "a"))
    ledger.observe(350 * MIB, NOW + 1)
    assert isinstance(ledger.commit(held, Measured(200 * MIB, 90 * MIB)), Committed)
    assert ledger.totals().over_bytes == 240 * MIB


def test_no_sample_or_an_old_one_is_a_deny() -> None:
    ledger = Ledger(
        DeviceSpec("cuda:0", "cuda", "reserve", 1000 * MIB, sample_max_age_ns=6_000_000_000)
    )
    claim = make_claim(ledger, "a", state=0)
    denied = refuse(ledger, claim)
    assert (denied.code, denied.sample_age_ms) == (DenyCode.STALE_SAMPLE, None)
    ledger.observe(5 * MIB, NOW)
    assert isinstance(ledger.decide(claim, NOW + 6_000_000_000), Admit)
    denied = refuse(ledger, claim, NOW + 6_000_000_001)
    assert (denied.code, denied.sample_age_ms) == (DenyCode.STALE_SAMPLE, 6000)
    # A late report from before changes nothing.
    assert ledger.observe(0, NOW - 1) is False
    assert ledger.foreign_bytes == 5 * MIB
    assert isinstance(ledger.decide(claim, NOW), Admit)
    ledger.forget_sample()
    assert refuse(ledger, claim).code is DenyCode.STALE_SAMPLE
    assert ledger.observe(0, NOW - 1) is True


# --- host and disk ----------------------------------------------------------------------------


def test_the_host_ledger_holds_every_agents_largest_state() -> None:
    ledger = make_ledger(host=100)
    reserve(ledger, make_claim(ledger, "a", state=60))
    denied = refuse(ledger, make_claim(ledger, "b", state=50))
    assert denied.code is DenyCode.HOST
    assert denied.ledger_max_bytes == 100 * MIB
    assert denied.ledger_allocated_bytes == 60 * MIB
    assert (denied.requested_bytes, denied.short_by_bytes) == (50 * MIB, 10 * MIB)
    assert not denied.never
    assert [(x.key, x.bytes) for x in denied.lines] == [("state:local/a", 60 * MIB)]
    assert refuse(ledger, make_claim(ledger, "c", state=101)).never
    ledger.set_pinned_backup("m", 30 * MIB)
    assert refuse(ledger, make_claim(ledger, "d", state=11)).short_by_bytes == 1 * MIB
    ledger.set_pinned_backup("m", 0)
    reserve(ledger, make_claim(ledger, "b", state=40))
    ledger.set_disk_used(7)
    totals = ledger.totals()
    assert (totals.host_promised_bytes, totals.disk_used_bytes) == (100 * MIB, 7)
    assert [x.key for x in ledger.host_lines()] == ["state:local/a", "state:local/b"]


# --- bad numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights_bytes", -1),
        ("pool_bytes", BYTES_MAX + 1),
        ("state_bytes", 1.5),
        ("scratch_bytes", True),
        ("n_ctx", 0),
        ("n_ctx", -5),
        ("n_ctx", N_CTX_MAX + 1),
        ("slots", 0),
        ("slots", SLOTS_MAX + 1),
        ("model", ""),
        ("model", "m" * 65),
        ("kv_type", "q8_0"),
    ],
)
def test_absurd_claims_are_typed_errors(field: str, value: object) -> None:
    good: dict[str, object] = {
        "agent": agent("a"),
        "model": "m",
        "kv_type": "f16",
        "n_ctx": 256,
        "slots": 1,
        "shape": PoolShape(256, 1, "f16"),
        "weights_bytes": 1,
        "pool_bytes": 1,
    }
    Claim(**good)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        Claim(**(good | {field: value}))  # type: ignore[arg-type]


def test_absurd_inputs_change_nothing() -> None:
    ledger = make_ledger()
    before = ledger.totals()
    for bad in (-1, BYTES_MAX + 1, 0.5):
        with pytest.raises(InvalidArgument):
            ledger.observe(bad, NOW)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            ledger.set_base(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            ledger.set_pinned_backup("m", bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            ledger.set_disk_used(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            Measured(weights_bytes=bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            DeviceSpec("cpu", "cpu", "reserve", bad)  # type: ignore[arg-type]
    for n_ctx, slots in ((0, 1), (-1, 1), (1, 0), (N_CTX_MAX + 1, 1)):
        with pytest.raises(InvalidArgument):
            ledger.shape_with("m", "f16", agent("a"), n_ctx, slots)
    for percent in (0, 101, -1):
        with pytest.raises(InvalidArgument):
            DeviceSpec("cpu", "cpu", "reserve", 1, admission_percent=percent)
    assert ledger.totals() == before


def test_the_largest_numbers_do_not_wrap() -> None:
    spec = DeviceSpec("cpu", "cpu", "reserve", BYTES_MAX, host_cap_bytes=BYTES_MAX)
    ledger = Ledger(spec)
    ledger.observe(BYTES_MAX, NOW)
    shape = PoolShape(256, 1, "f16")
    most = BYTES_MAX
    huge = Claim(agent("a"), "m", "f16", 1, 1, shape, most, most, most, most)
    denied = refuse(ledger, huge)
    assert denied.requested_bytes == 3 * BYTES_MAX
    assert denied.short_by_bytes == 3 * BYTES_MAX
    assert denied.never
