"""Commit, measure, roll back, release. Sizes in MiB."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledger_cases import MIB, NOW, agent, lines, make_claim, make_ledger, reserve

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Measured
from vram_conductor.broker.ledger.decisions import Admit, Committed, Deny, DenyCode
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol.errors import AlreadyExists, FailedPrecondition, InvalidArgument
from vram_conductor.protocol.values import LedgerMode, PoolShape


def test_claims_are_reconciled_with_what_was_measured() -> None:
    ledger = make_ledger()
    held = reserve(ledger, make_claim(ledger, "embedder", weights=500, pool=400))
    assert ledger.promised_bytes == 900 * MIB
    measured = Measured(480 * MIB, 20 * MIB, 5 * MIB)
    done = ledger.commit(held, measured)
    assert done == Committed(agent("embedder"), 505 * MIB, unmeasured=False)
    assert lines(ledger) == {"weights:m": 480, "scratch:m@f16": 5, "pool:m@f16": 20}
    # A second agent of the same model and shape is counted by the measurement.
    again = ledger.decide(make_claim(ledger, "b", weights=500, pool=400), NOW)
    assert again == Admit("cpu", 0, 495 * MIB, shares_weights=True)


def test_scratch_of_nothing_is_no_line() -> None:
    ledger = make_ledger()
    held = reserve(ledger, make_claim(ledger, "a"))
    ledger.commit(held, Measured(200 * MIB, 100 * MIB, 0))
    assert set(lines(ledger)) == {"weights:m", "pool:m@f16"}


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
    unseen = PoolShape(256, 1, "f16")
    assert ledger.measured("m", Measured(scratch_bytes=1), unseen) is not None
    assert ledger.measured("m", Measured(pool_bytes=101 * MIB), unseen) is not None
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


def test_a_measured_pool_corrects_an_estimate_that_is_committed_after_it() -> None:
    ledger = make_ledger()
    early = reserve(ledger, make_claim(ledger, "a", n_ctx=1024, pool=80))
    held = reserve(ledger, make_claim(ledger, "b", n_ctx=2048, pool=100))
    ledger.commit(held, Measured(pool_bytes=50 * MIB))
    assert lines(ledger)["pool:m@f16"] == 80  # still held for a's load
    ledger.commit(early)
    assert lines(ledger)["pool:m@f16"] == 50
    ledger.release(agent("b"))
    assert lines(ledger)["pool:m@f16"] == 50


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


def test_a_measurement_is_not_corrected_by_one_around_it() -> None:
    ledger = make_ledger()
    ledger.commit(
        reserve(ledger, make_claim(ledger, "a", n_ctx=1024)), Measured(pool_bytes=60 * MIB)
    )
    held = reserve(ledger, make_claim(ledger, "b", n_ctx=2048))
    ledger.commit(held, Measured(pool_bytes=45 * MIB))
    ledger.release(agent("b"))
    assert lines(ledger)["pool:m@f16"] == 60


@pytest.mark.parametrize("mode", ["reserve", "timeshare"])
def test_every_pool_of_a_model_is_a_context_with_scratch_of_its_own(mode: LedgerMode) -> None:
    """Pools take turns; what a context takes beyond its buffers stays while it waits."""
    ledger = make_ledger(1000, mode)
    first = replace(make_claim(ledger, "a", pool=100), scratch_bytes=12 * MIB)
    ledger.commit(reserve(ledger, first))
    assert ledger.promised_bytes == (200 + 100 + 12) * MIB
    second = replace(make_claim(ledger, "b", kv_type="q8_0", pool=60), scratch_bytes=12 * MIB)
    assert ledger.decide(second, NOW) == Admit("cpu", 12 * MIB, 676 * MIB, shares_weights=True)
    ledger.commit(reserve(ledger, second))
    assert ledger.promised_bytes == (200 + 100 + 24) * MIB
    found = {key: size for key, size in lines(ledger).items() if key.startswith("scratch")}
    assert found == {"scratch:m@f16": 12, "scratch:m@q8_0": 12}
    assert ledger.measured("m", Measured(scratch_bytes=14 * MIB)) is None
    assert ledger.promised_bytes == (200 + 100 + 28) * MIB
    ledger.release(agent("a"))
    assert ledger.promised_bytes == (200 + 60 + 14) * MIB
    assert set(lines(ledger)) == {"weights:m", "scratch:m@q8_0", "pool:m@q8_0"}


def test_scratch_counts_before_anything_is_loaded() -> None:
    ledger = make_ledger(310)
    claim = make_claim(ledger, "a", weights=200, pool=100)
    assert isinstance(ledger.decide(claim, NOW), Admit)
    denied = ledger.decide(replace(claim, scratch_bytes=11 * MIB), NOW)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.short_by_bytes) == (DenyCode.CAP, 1 * MIB)
