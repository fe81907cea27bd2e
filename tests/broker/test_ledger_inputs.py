"""Foreign bytes, host memory, and numbers that make no sense. Sizes in MiB."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import MIB, NOW, agent, make_claim, make_ledger, refuse, reserve

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.broker.ledger.decisions import Admit, Committed, DenyCode
from vram_conductor.broker.ledger.host import HostLedger
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.limits import BYTES_MAX, N_CTX_MAX, SLOTS_MAX
from vram_conductor.protocol.values import PoolShape

# --- what others use ---


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


# --- host and disk ---


def test_the_host_ledger_holds_every_agents_largest_state_and_room_to_write_one() -> None:
    ledger = make_ledger(host=160)
    reserve(ledger, make_claim(ledger, "a", state=50))
    denied = refuse(ledger, make_claim(ledger, "b", state=61))
    assert denied.code is DenyCode.HOST
    assert denied.ledger_max_bytes == 160 * MIB
    assert denied.ledger_allocated_bytes == 100 * MIB
    # 61 for itself, and 11 more than the 50 that writing one of them takes already.
    assert (denied.requested_bytes, denied.short_by_bytes) == (72 * MIB, 12 * MIB)
    assert not denied.never
    lines = [("state:local/a", 50 * MIB), ("spare", 50 * MIB)]
    assert [(x.key, x.bytes) for x in denied.lines] == lines
    assert refuse(ledger, make_claim(ledger, "c", state=81)).never
    assert not refuse(ledger, make_claim(ledger, "c", state=80)).never
    ledger.set_pinned_backup("m", 30 * MIB)
    assert refuse(ledger, make_claim(ledger, "d", state=31)).short_by_bytes == 1 * MIB
    ledger.set_pinned_backup("m", 0)
    reserve(ledger, make_claim(ledger, "b", state=55))
    ledger.set_disk_used(7)
    totals = ledger.totals()
    assert (totals.host_promised_bytes, totals.disk_used_bytes) == (160 * MIB, 7)
    assert [x.key for x in ledger.host_lines()] == ["state:local/a", "state:local/b", "spare"]
    ledger.release(agent("b"))
    assert ledger.totals().host_promised_bytes == 100 * MIB


@given(
    states=st.lists(st.integers(0, 50), max_size=5),
    room=st.integers(0, 200),
)
def test_the_largest_state_that_fits_is_admitted_and_no_larger_one(
    states: list[int], room: int
) -> None:
    host = HostLedger()
    for n, size in enumerate(states):
        host.add(agent(f"a{n}"), size)
    best = host.largest_state(room)
    assert host.growth_bytes(best) <= room < host.growth_bytes(best + 1)


# --- bad numbers ---


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
