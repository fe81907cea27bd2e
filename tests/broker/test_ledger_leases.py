"""Leases and foreign bytes: promised once, counted once, gone in time. Sizes in MiB."""

from __future__ import annotations

import pytest

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Deny, DenyCode, Lease, Reservation
from vram_conductor.broker.ledger.ledger import Ledger
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


def grant(ledger: Ledger, name: str, size: int, ttl_ms: int | None = None, now: int = 0) -> Lease:
    answer = ledger.grant_lease(name, size * MIB, None if ttl_ms is None else ttl_ms * MS, now)
    assert isinstance(answer, Lease), answer
    return answer


def test_a_lease_is_a_line_of_the_promise() -> None:
    ledger = make_ledger()
    assert grant(ledger, "train", 600) == Lease("train", 600 * MIB, None)
    assert [(x.key, x.bytes) for x in ledger.lines()] == [("lease:train", 600 * MIB)]
    assert free(ledger) == 400
    denied = ledger.grant_lease("more", 401 * MIB, None, 0)
    assert isinstance(denied, Deny)
    assert (denied.code, denied.short_by_bytes, denied.note) == (
        DenyCode.CAP,
        1 * MIB,
        "lease more",
    )
    assert not denied.never
    never = ledger.grant_lease("more", 1001 * MIB, None, 0)
    assert isinstance(never, Deny)
    assert never.never
    assert ledger.release_lease("train") is True
    assert ledger.release_lease("train") is False
    assert free(ledger) == 1000


def test_a_lease_in_use_does_not_count_twice() -> None:
    ledger = make_ledger()
    grant(ledger, "train", 600)
    ledger.observe(250 * MIB, 1)  # its holder begins to allocate
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    ledger.observe(600 * MIB, 2)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    ledger.observe(700 * MIB, 3)  # more than it may, or somebody else
    assert (ledger.foreign_bytes, free(ledger)) == (100 * MIB, 300)
    ledger.observe(600 * MIB, 4)
    assert (ledger.foreign_bytes, free(ledger)) == (0, 400)
    # The lease ends, its holder does not: now it is foreign, and no byte is free that is used.
    ledger.release_lease("train")
    assert (ledger.foreign_bytes, free(ledger)) == (600 * MIB, 400)


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
    ledger = make_ledger()
    ledger.observe(0, 1)
    grant(ledger, "train", 600, now=1)
    again = make_ledger()
    again._gauge.__init__()  # type: ignore[misc]
    again._leases.add(Lease("train", 600 * MIB, None))
    again.observe(650 * MIB, 1)
    assert again.foreign_bytes == 50 * MIB


def test_a_lease_expires_at_its_time_and_not_after_it() -> None:
    ledger = make_ledger()
    grant(ledger, "b", 100, ttl_ms=20)
    grant(ledger, "a", 200, ttl_ms=10)
    grant(ledger, "c", 300)
    assert free(ledger, 10 * MS - 1) == 400
    assert ledger.expire(10 * MS - 1) == []
    # A decision does not wait for somebody to sweep.
    assert free(ledger, 10 * MS) == 600
    assert free(ledger, 20 * MS) == 700
    assert ledger.expire(20 * MS) == ["a", "b"]
    assert ledger.expire(20 * MS) == []
    grant(ledger, "a", 200, ttl_ms=10, now=20 * MS)


def test_a_lease_can_be_renewed_while_it_lives() -> None:
    ledger = make_ledger()
    grant(ledger, "a", 100, ttl_ms=10)
    assert ledger.renew_lease("a", 30 * MS, 5 * MS) == Lease("a", 100 * MIB, 35 * MS)
    assert ledger.expire(34 * MS) == []
    assert ledger.renew_lease("a", None, 34 * MS) == Lease("a", 100 * MIB, None)
    assert ledger.expire(10**15) == []
    assert ledger.renew_lease("b", None, 0) is None
    grant(ledger, "b", 100, ttl_ms=10)
    assert ledger.renew_lease("b", 10 * MS, 10 * MS) is None
    ledger.validate_state()


def test_a_lease_needs_a_sample_a_name_and_sane_numbers() -> None:
    ledger = make_ledger()
    grant(ledger, "a", 1)
    with pytest.raises(AlreadyExists):
        ledger.grant_lease("a", 1, None, 0)
    for name, size, ttl in (("", 1, None), ("x" * 65, 1, None), ("x", -1, None), ("x", 1, 0)):
        with pytest.raises(InvalidArgument):
            ledger.grant_lease(name, size, ttl, 0)
    with pytest.raises(InvalidArgument):
        ledger.renew_lease("a", -1, 0)
    ledger.forget_sample()
    denied = ledger.grant_lease("x", 1, None, 0)
    assert isinstance(denied, Deny)
    assert denied.code is DenyCode.STALE_SAMPLE
    assert [x.key for x in ledger.lines()] == ["lease:a"]


def test_agents_and_leases_share_one_cap() -> None:
    ledger = make_ledger()
    assert isinstance(ledger.reserve(make_claim(700), 0), Reservation)
    assert isinstance(ledger.grant_lease("x", 301 * MIB, None, 0), Deny)
    grant(ledger, "x", 300)
    assert ledger.totals().free_bytes == 0
    assert ledger.totals().leases_bytes == 300 * MIB
