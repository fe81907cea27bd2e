"""Leases and foreign bytes: promised once, counted once, gone in time. Sizes in MiB."""

from __future__ import annotations

import pytest

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.broker.ledger.decisions import (
    Deny,
    DenyCode,
    Lease,
    LeaseKey,
    Reservation,
)
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.ledger.obstacles import FOREIGN, need_bytes, obstacle
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import AlreadyExists, InvalidArgument
from vram_conductor.protocol.values import AgentKey, PoolShape

MIB = 1 << 20
GIB = 1 << 30
MS = 1_000_000


def make_ledger(cap: int = 1000) -> Ledger:
    ledger = Ledger(DeviceSpec("cuda:0", "cuda", "reserve", cap * MIB))
    ledger.observe(0, 0)
    return ledger


def make_claim(size: int) -> Claim:
    """An agent whose weights take ``size`` MiB, and nothing else."""
    shape = PoolShape(256, 1, "f16")
    return Claim(AgentKey("p", "a"), "m", "f16", 256, 1, shape, size * MIB, 0)


def free(ledger: Ledger, now_ns: int = 0) -> int:
    """MiB that could still be promised, found by asking."""
    low, high = -1, 2000
    while low < high:
        middle = (low + high + 1) // 2
        fits = not isinstance(ledger.decide(make_claim(middle), now_ns), Deny)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


LONG_MS = 3_600_000


def key(name: str) -> LeaseKey:
    return LeaseKey("p", name)


def ask(ledger: Ledger, name: str, size: int, now: int = 0, *, park: bool = False) -> Lease:
    """A pending lease."""
    answer = ledger.grant_lease(key(name), size * MIB, now, park=park)
    assert isinstance(answer, Lease), answer
    return answer


def grant(
    ledger: Ledger,
    name: str,
    size: int,
    ttl_ms: int = LONG_MS,
    now: int = 0,
    *,
    park: bool = False,
) -> Lease:
    """One that is held."""
    ask(ledger, name, size, now, park=park)
    held = ledger.hold_lease(key(name), ttl_ms * MS, now)
    assert held is not None
    return held


def test_a_lease_is_a_line_of_the_promise_and_off_the_budget() -> None:
    ledger = make_ledger()
    grant(ledger, "train", 600)
    assert [(x.key, x.bytes) for x in ledger.lines()] == [("lease:p/train", 600 * MIB)]
    assert free(ledger) == 400
    assert ledger.budget_bytes == 400 * MIB
    denied = ledger.grant_lease(key("more"), 401 * MIB, 0, park=False)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.short_by_bytes, denied.note) == (
        DenyCode.CAP,
        1 * MIB,
        "lease more",
    )
    assert not denied.never
    assert denied.leases_bytes == 600 * MIB
    never = ledger.grant_lease(key("more"), 1001 * MIB, 0, park=True)
    assert isinstance(never, Deny)
    assert never.never
    assert ledger.release_lease(key("train")) is True
    assert ledger.release_lease(key("train")) is False
    assert free(ledger) == 1000
    assert ledger.budget_bytes == 1000 * MIB


def test_the_base_is_nobodys_to_lease() -> None:
    ledger = make_ledger()
    ledger.set_base(100 * MIB)
    never = ledger.grant_lease(key("x"), 901 * MIB, 0, park=True)
    assert isinstance(never, Deny)
    assert never.never
    assert never.ledger_allocated_bytes == 100 * MIB
    ask(ledger, "x", 900, park=True)
    assert ledger.budget_bytes == 100 * MIB


def test_a_lease_that_parks_is_granted_beside_what_agents_were_promised() -> None:
    ledger = make_ledger()
    assert isinstance(ledger.reserve(make_claim(700), 0), Reservation)
    denied = ledger.grant_lease(key("x"), 301 * MIB, 0, park=False)
    assert isinstance(denied, Deny)
    assert (denied.agents, denied.short_by_bytes) == (1, 1 * MIB)
    grant(ledger, "x", 1000, park=True)
    assert (ledger.budget_bytes, ledger.over_bytes) == (0, 700 * MIB)
    # Agents are not what is in the way of another one.
    denied = ledger.grant_lease(key("y"), 1 * MIB, 0, park=True)
    assert isinstance(denied, Deny)
    assert (denied.agents, denied.short_by_bytes, denied.never) == (0, 1 * MIB, False)
    ledger.release_lease(key("x"))
    assert (ledger.budget_bytes, ledger.over_bytes) == (1000 * MIB, 0)


def test_what_an_agent_was_promised_is_measured_while_it_is_parked() -> None:
    ledger = make_ledger()
    reserved = ledger.reserve(make_claim(700), 0)
    assert isinstance(reserved, Reservation)
    grant(ledger, "x", 900, park=True)
    assert not isinstance(ledger.commit(reserved, Measured(weights_bytes=720 * MIB)), Deny)
    assert ledger.weights_bytes("m") == 720 * MIB
    # Beyond the cap it grows no more than ever.
    assert isinstance(ledger.measured("m", Measured(weights_bytes=1001 * MIB)), Deny)
    assert ledger.weights_bytes("m") == 720 * MIB


def test_agents_that_come_back_were_there_before_the_leases_that_park() -> None:
    ledger = make_ledger()
    grant(ledger, "parks", 600, park=True)
    grant(ledger, "asks", 200)
    claim = make_claim(800)
    assert isinstance(ledger.reserve(claim, 0), Deny)
    assert isinstance(ledger.reserve(make_claim(801), 0, returning=True), Deny)
    assert isinstance(ledger.reserve(claim, 0, returning=True), Reservation)


def test_a_lease_in_use_does_not_count_twice() -> None:
    ledger = make_ledger()
    grant(ledger, "train", 600)
    ledger.observe(250 * MIB, 1)  # its holder begins to allocate
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    ledger.observe(600 * MIB, 2)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    ledger.observe(700 * MIB, 3)  # more than it may, or somebody else
    assert (ledger.foreign_bytes, free(ledger)) == (100 * MIB, 300)
    assert ledger.budget_bytes == 300 * MIB
    ledger.observe(600 * MIB, 4)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    # The lease ends, its holder does not: now it is foreign, and no byte is free that is used.
    ledger.release_lease(key("train"))
    assert (ledger.foreign_bytes, free(ledger)) == (600 * MIB, 400)
    assert ledger.budget_bytes == 400 * MIB


def test_what_grows_while_a_lease_is_pending_is_not_its_holders() -> None:
    """Its holder has not been told yet. Where own use is known by difference only, what the
    worker failed to give back would look just like that."""
    ledger = make_ledger()
    ask(ledger, "train", 600)
    ledger.observe(250 * MIB, 1)
    assert (ledger.foreign_bytes, ledger.budget_bytes) == (250 * MIB, 150 * MIB)
    assert ledger.hold_lease(key("train"), LONG_MS * MS, 2) is not None
    assert ledger.foreign_bytes == 250 * MIB
    ledger.observe(850 * MIB, 3)
    assert ledger.foreign_bytes == 250 * MIB


def test_an_unused_lease_hides_nothing_of_what_others_use() -> None:
    ledger = make_ledger()
    ledger.observe(300 * MIB, 0)
    grant(ledger, "train", 600)
    assert (ledger.foreign_bytes, free(ledger)) == (300 * MIB, 100)
    ledger.observe(300 * MIB, 1)
    assert (ledger.foreign_bytes, free(ledger)) == (300 * MIB, 100)
    ledger.observe(900 * MIB, 2)
    assert (ledger.foreign_bytes, free(ledger)) == (300 * MIB, 100)
    grant(ledger, "small", 50)
    assert (ledger.foreign_bytes, free(ledger)) == (300 * MIB, 50)
    # A renewal is no new grant: the holder's use stays the holder's.
    assert ledger.hold_lease(key("train"), LONG_MS * MS, 3) is not None
    assert (ledger.foreign_bytes, free(ledger)) == (300 * MIB, 50)


def test_what_others_gave_back_may_become_the_leases() -> None:
    ledger = make_ledger()
    ledger.observe(300 * MIB, 0)
    grant(ledger, "train", 600)
    ledger.observe(0, 1)
    assert free(ledger) == 400
    ledger.observe(200 * MIB, 2)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)


def test_a_sampler_that_knows_the_holders_is_believed() -> None:
    ledger = make_ledger()
    ledger.observe(300 * MIB, 0)
    grant(ledger, "train", 600)
    # The old program left while the holder took as much: only the sampler can tell.
    ledger.observe(300 * MIB, 1, leased_bytes=300 * MIB)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    ledger.observe(900 * MIB, 2, leased_bytes=800 * MIB)
    assert ledger.foreign_bytes == 300 * MIB  # a holder above its lease is foreign
    ledger.observe(700 * MIB, 3)
    assert ledger.foreign_bytes == 100 * MIB


def test_leases_older_than_the_first_sample_are_taken_to_be_in_use() -> None:
    ledger = Ledger(DeviceSpec("cuda:0", "cuda", "reserve", 1000 * MIB))
    ledger.restore_lease(key("train"), 600 * MIB, LONG_MS * MS, 0, park=True)
    ledger.observe(650 * MIB, 1)
    assert ledger.foreign_bytes == 50 * MIB
    assert ledger.budget_bytes == 350 * MIB
    assert ledger.expire(LONG_MS * MS) == [key("train")]


def test_a_lease_expires_at_its_time_and_not_after_it() -> None:
    ledger = make_ledger()
    grant(ledger, "b", 100, ttl_ms=20)
    grant(ledger, "a", 200, ttl_ms=10)
    grant(ledger, "c", 300)
    assert [lease.key.name for lease in ledger.leases()] == ["a", "b", "c"]
    assert free(ledger, 10 * MS - 1) == 400
    assert ledger.expire(10 * MS - 1) == []
    # A decision does not wait for somebody to sweep.
    assert free(ledger, 10 * MS) == 600
    assert free(ledger, 20 * MS) == 700
    assert ledger.expire(20 * MS) == [key("a"), key("b")]
    assert ledger.expire(20 * MS) == []
    grant(ledger, "a", 200, ttl_ms=10, now=20 * MS)


def test_a_pending_lease_does_not_expire() -> None:
    ledger = make_ledger()
    ask(ledger, "a", 100)
    assert ledger.expire(10**18) == []
    assert [x.detail for x in ledger.lines()] == ["pending"]
    ledger.observe(0, 10**18)
    assert free(ledger, 10**18) == 900


def test_a_lease_can_be_renewed_while_it_lives() -> None:
    ledger = make_ledger()
    grant(ledger, "a", 100, ttl_ms=10)
    assert ledger.hold_lease(key("a"), 30 * MS, 5 * MS) == Lease(
        key("a"), 100 * MIB, False, 35 * MS
    )
    assert ledger.expire(34 * MS) == []
    assert ledger.hold_lease(key("b"), 1, 0) is None
    grant(ledger, "b", 100, ttl_ms=10)
    assert ledger.hold_lease(key("b"), 10 * MS, 10 * MS) is None
    ledger.validate_state()


def test_a_lease_needs_a_sample_a_name_and_sane_numbers() -> None:
    ledger = make_ledger()
    grant(ledger, "a", 1)
    with pytest.raises(AlreadyExists):
        ledger.grant_lease(key("a"), 1, 0, park=True)
    for name, size in (("", 1), ("x" * 65, 1), ("x", -1), ("x", limits.BYTES_MAX + 1)):
        with pytest.raises(InvalidArgument):
            ledger.grant_lease(key(name), size, 0, park=True)
    for ttl in (0, -1, LONG_MS * MS + 1):
        with pytest.raises(InvalidArgument):
            ledger.hold_lease(key("a"), ttl, 0)
    ledger.forget_sample()
    denied = ledger.grant_lease(key("x"), 1, 0, park=True)
    assert isinstance(denied, Deny)
    assert denied.code is DenyCode.STALE_SAMPLE
    assert [x.key for x in ledger.lines()] == ["lease:p/a"]


def test_agents_and_leases_share_one_cap() -> None:
    ledger = make_ledger()
    assert isinstance(ledger.reserve(make_claim(700), 0), Reservation)
    assert isinstance(ledger.grant_lease(key("x"), 301 * MIB, 0, park=False), Deny)
    grant(ledger, "x", 300)
    assert ledger.totals().free_bytes == 0
    assert ledger.totals().leases_bytes == 300 * MIB


def test_the_obstacle_is_the_lease_with_whose_end_the_agent_fits() -> None:
    ledger = make_ledger()
    ledger.set_base(50 * MIB)
    claim = make_claim(700)
    assert obstacle(ledger, claim.agent) == ""
    assert isinstance(ledger.reserve(claim, 0), Reservation)
    assert need_bytes(ledger, claim.agent) == 750 * MIB
    grant(ledger, "first", 250, ttl_ms=5, park=True)
    assert obstacle(ledger, claim.agent) == ""
    second = grant(ledger, "second", 400, ttl_ms=20, park=True)
    third = grant(ledger, "third", 100, ttl_ms=30, park=True)
    ask(ledger, "never ends yet", 50, park=True)
    assert obstacle(ledger, claim.agent) == second
    ledger.observe(50 * MIB, 1, leased_bytes=0)
    assert obstacle(ledger, claim.agent) == second
    ledger.observe(150 * MIB, 2, leased_bytes=0)
    assert obstacle(ledger, claim.agent) == third
    ledger.observe(251 * MIB, 3, leased_bytes=0)
    assert obstacle(ledger, claim.agent) == FOREIGN
