"""Placement over several devices, and the context that would fit. Sizes in MiB."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.broker.ledger import admission
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.broker.ledger.decisions import (
    Admit,
    Deny,
    DenyCode,
    LeaseKey,
    Reservation,
    Stale,
)
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import AgentKey, LedgerMode, PoolShape

MIB = 1 << 20


def make_ledger(device: str, cap: int, mode: LedgerMode = "reserve", host: int = 10_000) -> Ledger:
    ledger = Ledger(DeviceSpec(device, "cpu", mode, cap * MIB, host_cap_bytes=host * MIB))
    ledger.observe(0, 0)
    return ledger


def make_claim(
    ledger: Ledger,
    name: str,
    model: str = "m",
    n_ctx: int = 1024,
    slots: int = 1,
    weights: int = 100,
) -> Claim:
    """Pools take 1 MiB per 256 cells and 1 per slot; states 1 MiB per 256 tokens."""
    key = AgentKey("p", name)
    shape = ledger.shape_with(model, "f16", key, n_ctx, slots)
    return Claim(
        agent=key,
        model=model,
        kv_type="f16",
        n_ctx=n_ctx,
        slots=slots,
        shape=shape,
        weights_bytes=weights * MIB,
        pool_bytes=pool_bytes(shape),
        state_bytes=n_ctx * MIB // 256,
    )


def pool_bytes(shape: PoolShape) -> int:
    return (shape.cells // 256 + shape.slots) * MIB


def fit_cells(fit_bytes: int, slots: int) -> int:
    """What the worker answers: the largest cell count whose pool takes at most that much."""
    return max(0, fit_bytes // MIB - slots) * 256


def fill(ledger: Ledger, size: int, name: str = "filler") -> None:
    """Take ``size`` MiB with an agent of a model of its own."""
    key, shape = AgentKey("p", name), PoolShape(256, 1, "f16")
    claim = Claim(key, name, "f16", 256, 1, shape, size * MIB, 0)
    assert isinstance(ledger.reserve(claim, 0), Reservation)


def ask(ledgers: dict[str, Ledger], name: str, model: str = "m") -> Admit | Stale | Refusal:
    requests = {device: make_claim(ledger, name, model) for device, ledger in ledgers.items()}
    return admission.place(ledgers, requests, 0)


# --- placement --------------------------------------------------------------------------------


def test_a_full_device_is_merely_full() -> None:
    ledgers = {d: make_ledger(d, 200) for d in ("cpu:0", "cpu:1", "cpu:2")}
    fill(ledgers["cpu:0"], 200)
    answer = ask(ledgers, "a")
    assert isinstance(answer, Admit)
    assert answer.device == "cpu:1"


def test_the_tightest_device_that_fits_is_chosen() -> None:
    ledgers = {"cpu:0": make_ledger("cpu:0", 500), "cpu:1": make_ledger("cpu:1", 120)}
    assert ask(ledgers, "a") == Admit("cpu:1", 105 * MIB, 15 * MIB, shares_weights=False)
    fill(ledgers["cpu:1"], 16)
    assert ask(ledgers, "a") == Admit("cpu:0", 105 * MIB, 395 * MIB, shares_weights=False)


def test_a_device_that_has_the_model_is_preferred() -> None:
    ledgers = {"cpu:0": make_ledger("cpu:0", 500), "cpu:1": make_ledger("cpu:1", 120)}
    ledgers["cpu:0"].reserve(make_claim(ledgers["cpu:0"], "first"), 0)
    answer = ask(ledgers, "a")
    assert answer == Admit("cpu:0", 0, 395 * MIB, shares_weights=True)


def test_when_all_refuse_every_device_tells_why() -> None:
    ledgers = {d: make_ledger(d, cap) for d, cap in (("cpu:0", 200), ("cpu:1", 50), ("cpu:2", 110))}
    fill(ledgers["cpu:0"], 100)
    fill(ledgers["cpu:2"], 100)
    requests: dict[str, Claim | Deny] = {
        device: make_claim(ledger, "a") for device, ledger in ledgers.items()
    }
    requests["cpu:3"] = admission.no_worker("cpu:3")
    answer = admission.place(ledgers, requests, 0)
    assert isinstance(answer, Refusal)
    told = {deny.device: (deny.code, deny.short_by_bytes, deny.never) for deny in answer.denies}
    assert told == {
        "cpu:0": (DenyCode.CAP, 5 * MIB, False),
        "cpu:1": (DenyCode.CAP, 55 * MIB, True),
        "cpu:2": (DenyCode.CAP, 95 * MIB, False),
        "cpu:3": (DenyCode.NO_DEVICE, 0, False),
    }
    capped = Refusal(answer.denies[:3])
    assert capped.closest.device == "cpu:0"
    hinted = tuple(
        replace(d, largest_n_ctx_that_fits=512) if d.device == "cpu:2" else d for d in capped.denies
    )
    assert Refusal(hinted).closest.device == "cpu:2"


def test_a_stale_estimate_of_any_candidate_is_asked_again() -> None:
    ledgers = {d: make_ledger(d, 500) for d in ("cpu:0", "cpu:1")}
    requests = {device: make_claim(ledger, "a", slots=2) for device, ledger in ledgers.items()}
    ledgers["cpu:1"].reserve(make_claim(ledgers["cpu:1"], "b"), 0)
    answer = admission.place(ledgers, requests, 0)
    assert answer == Stale("cpu:1", PoolShape(2048, 2, "f16"))


# --- without numbers from a worker ------------------------------------------------------------


def test_no_estimate_no_admission() -> None:
    ledger = make_ledger("cpu", 500)
    cause = ErrorInfo(Code.INTERNAL, "estimate_failed", "unusual tensor override")
    denied = admission.no_estimate(ledger, cause)
    answer = admission.place({"cpu": ledger}, {"cpu": denied}, 0)
    assert isinstance(answer, Refusal)
    assert answer.closest.code is DenyCode.NO_ESTIMATE
    assert "unusual tensor override" in answer.closest.note
    assert "did not answer" in admission.no_estimate(ledger, None).note
    assert ledger.lines() == ()


def test_a_file_larger_than_the_cap_needs_no_estimate() -> None:
    ledger = make_ledger("cpu", 500)
    fill(ledger, 400)
    assert admission.check_file(ledger, 500 * MIB) is None
    denied = admission.check_file(ledger, 500 * MIB + 1)
    assert denied is not None
    assert (denied.code, denied.never) == (DenyCode.FILE, True)
    assert denied.ledger_max_bytes == 500 * MIB
    assert denied.requested_bytes == 500 * MIB + 1
    assert denied.ledger_allocated_bytes == 400 * MIB


def test_too_many_agents() -> None:
    assert (
        admission.check_agents(limits.AGENTS_MAX - 1, limits.AGENTS_PER_PRINCIPAL_MAX - 1) is None
    )
    for total, own in ((limits.AGENTS_MAX, 0), (5, limits.AGENTS_PER_PRINCIPAL_MAX)):
        denied = admission.check_agents(total, own)
        assert denied is not None
        assert (denied.code, denied.never, denied.short_by_bytes) == (DenyCode.AGENTS, False, 0)


# --- what would fit ---------------------------------------------------------------------------


def test_the_largest_context_that_fits_is_admitted() -> None:
    ledger = make_ledger("cpu", 120)
    claim = make_claim(ledger, "a", n_ctx=8192)
    denied = ledger.reserve(claim, 0)
    assert isinstance(denied, Deny)
    assert denied.short_by_bytes == 13 * MIB
    assert ledger.fit_bytes(claim) == 20 * MIB
    assert admission.fit_n_ctx(ledger, claim, fit_cells(20 * MIB, 1)) == 19 * 256
    assert isinstance(ledger.decide(make_claim(ledger, "a", n_ctx=19 * 256), 0), Admit)
    assert isinstance(ledger.decide(make_claim(ledger, "a", n_ctx=19 * 256 + 1), 0), Deny)


def test_the_other_members_cells_are_theirs() -> None:
    ledger = make_ledger("cpu", 120)
    for name, n_ctx in (("a", 1024), ("b", 2048)):
        assert isinstance(
            ledger.reserve(make_claim(ledger, name, n_ctx=n_ctx, slots=2), 0), Reservation
        )
    claim = make_claim(ledger, "c", n_ctx=8192)
    assert claim.shape == PoolShape(8192 + 2048, 2, "f16")
    # 20 MiB: 18 × 256 cells on 2 slots, of which b keeps 2048.
    fits = admission.fit_n_ctx(ledger, claim, fit_cells(ledger.fit_bytes(claim), 2))
    assert fits == 18 * 256 - 2048
    assert isinstance(ledger.decide(make_claim(ledger, "c", n_ctx=fits), 0), Admit)
    assert isinstance(ledger.decide(make_claim(ledger, "c", n_ctx=fits + 1), 0), Deny)


def test_where_nothing_fits_the_answer_is_zero() -> None:
    ledger = make_ledger("cpu", 120)
    fill(ledger, 30)
    claim = make_claim(ledger, "a")
    assert ledger.fit_bytes(claim) == 0
    assert admission.fit_n_ctx(ledger, claim, 0) == 0
    # Another model's pool alone is too large beside these weights: no pool is small enough.
    other = make_ledger("cpu", 120)
    other.reserve(make_claim(other, "x", "n", n_ctx=256 * 20, weights=90), 0)
    assert other.fit_bytes(make_claim(other, "a", weights=20)) == 0
    assert other.fit_bytes(make_claim(other, "a", weights=9)) == 21 * MIB


def test_a_smaller_context_does_not_help_where_the_pool_is_too_large_already() -> None:
    ledger = make_ledger("cpu", 120)
    assert isinstance(ledger.reserve(make_claim(ledger, "a", n_ctx=2048), 0), Reservation)
    ledger.observe(15 * MIB, 0)  # 5 MiB are left of the 9 that the pool takes
    claim = make_claim(ledger, "b", n_ctx=4096)
    assert ledger.fit_bytes(claim) == 5 * MIB
    assert admission.fit_n_ctx(ledger, claim, fit_cells(5 * MIB, 1)) == 0


def test_the_host_and_the_training_limit_the_context_too() -> None:
    ledger = make_ledger("cpu", 120, host=10)
    claim = make_claim(ledger, "a", n_ctx=4096)
    denied = ledger.reserve(claim, 0)
    assert isinstance(denied, Deny)
    assert denied.code is DenyCode.HOST
    assert admission.fit_n_ctx(ledger, claim, None) == 1280
    assert isinstance(ledger.decide(make_claim(ledger, "a", n_ctx=1280), 0), Admit)
    assert isinstance(ledger.decide(make_claim(ledger, "a", n_ctx=1281), 0), Deny)
    assert admission.fit_n_ctx(ledger, claim, None, n_ctx_train=1024) == 1024
    assert admission.fit_n_ctx(ledger, claim, 512) == 512


def test_foreign_bytes_base_and_leases_shrink_what_fits() -> None:
    ledger = make_ledger("cpu", 200)
    claim = make_claim(ledger, "a")
    assert ledger.fit_bytes(claim) == 100 * MIB
    ledger.observe(10 * MIB, 0)
    ledger.set_base(5 * MIB)
    ledger.grant_lease(LeaseKey("p", "x"), 3 * MIB, 0, park=False)
    assert ledger.fit_bytes(claim) == 82 * MIB


members = st.lists(
    st.tuples(st.sampled_from("mn"), st.integers(1, 9000), st.integers(1, 4), st.booleans()),
    max_size=8,
)


@given(
    mode=st.sampled_from(["reserve", "timeshare"]),
    cap=st.integers(100, 400),
    before=members,
    foreign=st.integers(0, 60),
    n_ctx=st.integers(1, 100_000),
    slots=st.integers(1, 4),
)
def test_the_hint_is_admitted_and_one_step_more_is_not(
    mode: LedgerMode,
    cap: int,
    before: list[tuple[str, int, int, bool]],
    foreign: int,
    n_ctx: int,
    slots: int,
) -> None:
    ledger = make_ledger("cpu", cap, mode)
    for number, (model, size, wide, measure) in enumerate(before):
        claim = make_claim(ledger, f"agent{number}", model, size, wide)
        held = ledger.reserve(claim, 0)
        if isinstance(held, Reservation):
            ledger.commit(held, Measured(100 * MIB, claim.pool_bytes) if measure else Measured())
    ledger.observe(foreign * MIB, 0)
    claim = make_claim(ledger, "new", "m", n_ctx, slots)
    fits = admission.fit_n_ctx(ledger, claim, fit_cells(ledger.fit_bytes(claim), claim.shape.slots))
    assert fits <= n_ctx
    if isinstance(ledger.decide(claim, 0), Admit):
        assert fits == n_ctx
        return
    if fits:
        assert isinstance(ledger.decide(make_claim(ledger, "new", "m", fits, slots), 0), Admit)
    more = fits - fits % 256 + 256 if fits % 256 else fits + 256
    if more <= n_ctx:
        assert isinstance(ledger.decide(make_claim(ledger, "new", "m", more, slots), 0), Deny)
