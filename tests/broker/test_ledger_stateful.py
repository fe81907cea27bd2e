"""Random histories of one host's ledgers, beside an oracle that recounts everything naively.

After every step the two agree to the byte, the promise is within
the cap wherever it grew, and it never grew because something ended.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ledger_oracle import Oracle, key, name

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import NOTHING_MEASURED, Claim, Measured
from vram_conductor.broker.ledger.decisions import (
    Committed,
    Deny,
    DenyCode,
    Lease,
    LeaseKey,
    Reservation,
    Stale,
)
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.ledger.obstacles import need_bytes, obstacle
from vram_conductor.protocol.errors import AlreadyExists
from vram_conductor.protocol.values import AgentKey, KVType, LedgerMode, PoolShape

MAX_AGE_NS = 1_000
MODELS = ("ant", "bee")
KV_TYPES: tuple[KVType, ...] = ("f16", "q8_0")
DEVICES = ("cpu:0", "cpu:1")


def estimate(wild: bool, model: str, shape: PoolShape) -> int:
    """The worker's dry run: a deterministic size of a pool, smooth or erratic."""
    if wild:
        text = f"{model}/{shape.cells}/{shape.slots}/{shape.kv_type}".encode()
        return 1 + hashlib.sha256(text).digest()[0] // 4
    per = 2 if shape.kv_type == "f16" else 1
    return 11 * shape.slots + per * shape.cells // 64 + (7 if model == "bee" else 0)


agents = st.sampled_from([AgentKey("p", letter) for letter in "abcdefg"])
devices = st.sampled_from(DEVICES)
models = st.sampled_from(["ant", "ant", "bee"])
capacities = st.sampled_from([90, 140, 220, 400])
surprise = st.none() | st.integers(-6, 6) | st.integers(-40, 40)
contexts = st.sampled_from([1, 256, 257, 700, 1000, 2048, 3000]) | st.integers(1, 4000)
mostly = st.sampled_from([True, True, True, True, False])
some_bytes = st.integers(0, 60)
ttls = st.integers(1, 900)
lease_names = st.sampled_from(["l1", "l2", "l3"])


class Ask(NamedTuple):
    """What an agent asks for. ``drift``: estimates need not repeat to the byte."""

    agent: AgentKey
    model: str
    kv_type: KVType
    n_ctx: int
    slots: int
    drift: int


asks = st.builds(
    Ask,
    agents,
    models,
    st.sampled_from(KV_TYPES),
    contexts,
    st.integers(1, 3),
    st.sampled_from([0, 0, 0, 3]),
)


class Ledgers(RuleBasedStateMachine):
    """Two devices of one host; every rule runs on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.open: list[tuple[str, Reservation]] = []
        self.ended: list[tuple[str, Reservation]] = []
        self.serial = 0

    @initialize(
        mode=st.sampled_from(["reserve", "timeshare"]),
        caps=st.tuples(capacities, capacities),
        host_cap=st.sampled_from([20, 60, 400]),
        percent=st.sampled_from([100, 90]),
        wild=st.booleans(),
    )
    def begin(
        self, mode: LedgerMode, caps: tuple[int, int], host_cap: int, percent: int, wild: bool
    ) -> None:
        self.wild = wild
        self.ledgers = {
            device: Ledger(
                DeviceSpec(
                    device=device,
                    kind="cpu",
                    mode=mode,
                    total_bytes=cap,
                    admission_percent=percent,
                    host_cap_bytes=host_cap,
                    sample_max_age_ns=MAX_AGE_NS,
                )
            )
            for device, cap in zip(DEVICES, caps, strict=True)
        }
        self.oracles = {
            device: Oracle(mode, cap * percent // 100, host_cap, MAX_AGE_NS)
            for device, cap in zip(DEVICES, caps, strict=True)
        }
        for device in DEVICES:
            self.sample(device, 0)

    def sample(self, device: str, raw: int) -> None:
        assert self.ledgers[device].observe(raw, self.now)
        self.oracles[device].sample(raw, self.now)

    def expire(self, device: str) -> bool:
        """The ledger drops expired leases whenever it decides; so does the oracle."""
        return self.oracles[device].expire(self.now)

    def claim(self, device: str, ask: Ask) -> Claim:
        agent, model, kv, n, slots, drift = ask
        shape = self.ledgers[device].shape_with(model, kv, agent, n, slots)
        return Claim(
            agent=agent,
            model=model,
            kv_type=kv,
            n_ctx=n,
            slots=slots,
            shape=shape,
            weights_bytes=(40 if model == "ant" else 25) + drift,
            pool_bytes=estimate(self.wild, model, shape) + drift,
            state_bytes=n // 128,
            scratch_bytes=3 + drift if model == "bee" else 0,
        )

    # --- life of agents ---------------------------------------------------------------------

    @rule(device=devices, several=st.lists(st.tuples(asks, st.booleans()), min_size=1, max_size=4))
    def several_reserve(self, device: str, several: list[tuple[Ask, bool]]) -> None:
        self.sample(device, self.oracles[device].raw)
        for ask, then_commit in several:
            self.reserve(device, ask, sampled=False, then_commit=then_commit)

    @rule(device=devices, ask=asks, sampled=mostly, then_commit=st.booleans())
    def reserve_one(self, device: str, ask: Ask, sampled: bool, then_commit: bool) -> None:
        self.reserve(device, ask, sampled, then_commit)

    @rule(device=devices, ask=asks)
    def come_back(self, device: str, ask: Ask) -> None:
        """An agent that was admitted by a former broker: leases that park do not stop it."""
        self.reserve(device, ask, sampled=True, then_commit=True, returning=True)

    def reserve(
        self, device: str, ask: Ask, sampled: bool, then_commit: bool, returning: bool = False
    ) -> None:
        ledger, oracle = self.ledgers[device], self.oracles[device]
        if ask.agent in oracle.members:
            return
        if sampled:
            self.sample(device, oracle.raw)
        claim = self.claim(device, ask)
        expired = self.expire(device)
        expected = oracle.expect(claim, self.now, returning)
        before = state(ledger)
        answer = ledger.reserve(claim, self.now, returning=returning)
        if isinstance(answer, Reservation):
            assert expected == "admit"
            oracle.hold(claim)
            self.open.append((device, answer))
            parked = oracle.lease_bytes(park=True) if returning else 0
            most = ledger.cap_bytes + parked
            assert ledger.promised_bytes + ledger.foreign_bytes <= most
            assert sum(x.bytes for x in ledger.host_lines()) == oracle.host()
            if then_commit:
                self.finish(device, answer, NOTHING_MEASURED)
        else:
            assert isinstance(answer, Deny)
            assert str(answer.code) == expected
            assert (answer.short_by_bytes > 0) == (expected in ("CAP", "HOST"))
            assert ledger.release(ask.agent) is False
            # A deny leaves no trace; it only noticed that leases had expired.
            assert expired or state(ledger) == before

    @rule(device=devices, agent=agents, n=contexts, data=st.data())
    def reserve_with_an_old_estimate(
        self, device: str, agent: AgentKey, n: int, data: st.DataObject
    ) -> None:
        """Another agent joined between the estimate and the reservation."""
        ledger, oracle = self.ledgers[device], self.oracles[device]
        if agent in oracle.members:
            return
        now = ledger.shape_with("ant", "f16", agent, n, 1)
        more = data.draw(st.integers(1, 4)) * 256
        old = PoolShape(now.cells + more, now.slots, "f16")
        claim = Claim(agent, "ant", "f16", n, 1, old, 40, 1)
        self.expire(device)
        answer = ledger.reserve(claim, self.now)
        if oracle.expect(claim, self.now) == "stale":
            assert answer == Stale(device, now)
        else:
            assert isinstance(answer, Deny)
            assert answer.code is DenyCode.STALE_SAMPLE

    @precondition(lambda self: self.open)
    @rule(data=st.data(), weights=surprise, pool=surprise, scratch=st.none() | st.integers(0, 9))
    def commit(
        self, data: st.DataObject, weights: int | None, pool: int | None, scratch: int | None
    ) -> None:
        device, reservation = data.draw(st.sampled_from(self.open))
        claim = reservation.claim
        told = Measured(
            None if weights is None else claim.weights_bytes + max(-20, weights),
            None if pool is None else max(0, claim.pool_bytes + pool),
            scratch,
        )
        self.finish(device, reservation, told)

    def finish(self, device: str, reservation: Reservation, told: Measured) -> None:
        ledger, oracle, claim = self.ledgers[device], self.oracles[device], reservation.claim
        self.open.remove((device, reservation))
        before = ledger.promised_bytes
        fits = oracle.measure(claim.model, name(claim), key(claim.shape), told)
        answer = ledger.commit(reservation, told)
        if fits:
            assert isinstance(answer, Committed)
            oracle.settle(claim)
            taken = ledger.promised_bytes - oracle.lease_bytes(park=True)
            grew = ledger.promised_bytes > before
            assert not grew or taken + ledger.foreign_bytes <= ledger.cap_bytes
        else:
            assert isinstance(answer, Deny)
            assert answer.code is DenyCode.MEASURED
            assert answer.short_by_bytes > 0
            oracle.leave(claim.agent)
            assert claim.agent not in ledger
        self.ended.append((device, reservation))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        device, reservation = data.draw(st.sampled_from(self.open))
        self.open.remove((device, reservation))
        ledger = self.ledgers[device]
        before = ledger.promised_bytes
        assert ledger.rollback(reservation) is True
        self.oracles[device].leave(reservation.claim.agent)
        assert ledger.promised_bytes <= max(before, ledger.cap_bytes - ledger.foreign_bytes)
        self.ended.append((device, reservation))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def rollback_again(self, data: st.DataObject) -> None:
        device, reservation = data.draw(st.sampled_from(self.ended))
        before = state(self.ledgers[device])
        assert self.ledgers[device].rollback(reservation) is False
        assert state(self.ledgers[device]) == before

    @precondition(lambda self: any(oracle.members for oracle in self.oracles.values()))
    @rule(device=devices, nth=st.integers(0, 6), nobody=st.sampled_from([False] * 5 + [True]))
    def release(self, device: str, nth: int, nobody: bool) -> None:
        ledger, oracle = self.ledgers[device], self.oracles[device]
        here = sorted(oracle.members)
        stranger = AgentKey("p", "nobody")
        agent = stranger if nobody or not here else here[nth % len(here)]
        before = ledger.promised_bytes
        was_here = agent in oracle.members
        if was_here:
            oracle.leave(agent)
            gone = [x for x in self.open if x[0] == device and x[1].claim.agent == agent]
            self.open = [x for x in self.open if x not in gone]
            self.ended += gone
        assert ledger.release(agent) is was_here
        assert ledger.promised_bytes <= max(before, ledger.cap_bytes - ledger.foreign_bytes)
        once = state(ledger)
        assert ledger.release(agent) is False
        assert state(ledger) == once

    @rule(device=devices, ask=asks, as_release=st.booleans())
    def load_that_fails_at_once(self, device: str, ask: Ask, as_release: bool) -> None:
        """Reserve and roll back with nothing in between: not a byte has moved."""
        ledger = self.ledgers[device]
        if ask.agent in ledger:
            return
        self.sample(device, self.oracles[device].raw)
        self.expire(device)
        ledger.expire(self.now)
        before = state(ledger)
        answer = ledger.reserve(self.claim(device, ask), self.now)
        if isinstance(answer, Reservation):
            assert ledger.release(ask.agent) if as_release else ledger.rollback(answer)
        assert state(ledger) == before

    @precondition(lambda self: any(oracle.members for oracle in self.oracles.values()))
    @rule(
        device=devices,
        model=models,
        kv=st.sampled_from(KV_TYPES),
        weights=surprise,
        pool=surprise,
        seen=st.booleans(),
    )
    def measure_later(
        self, device: str, model: str, kv: KVType, weights: int | None, pool: int | None, seen: bool
    ) -> None:
        """First use of a pool; ``seen``: of the shape it has now, else of another."""
        ledger, oracle = self.ledgers[device], self.oracles[device]
        present = [pool for pool in sorted(oracle.pools) if pool[1] == kv]
        model = present[0][0] if present and seen else model
        view = ledger.pool(model, kv)
        shape = view.shape if view and seen else PoolShape(1024, 1, kv)
        size = view.bytes if view else 20
        told = Measured(
            None if weights is None else 40 + max(-20, weights),
            None if pool is None else max(0, size + pool),
        )
        before = state(ledger)
        promised = ledger.promised_bytes
        fits = oracle.measure(model, (model, kv), key(shape), told)
        answer = ledger.measured(model, told, shape)
        if fits:
            assert answer is None
            if ledger.promised_bytes > promised:
                # Leases that park agents go beyond the cap: the agents' turns make room.
                taken = ledger.promised_bytes - oracle.lease_bytes(park=True)
                assert taken + ledger.foreign_bytes <= ledger.cap_bytes
        else:
            assert isinstance(answer, Deny)
            assert answer.code is DenyCode.MEASURED
            assert state(ledger) == before

    # --- the world --------------------------------------------------------------------------

    @rule(device=devices, raw=st.just(0) | st.integers(0, 60) | st.integers(0, 300))
    def foreign(self, device: str, raw: int) -> None:
        promised = self.ledgers[device].promised_bytes
        self.sample(device, raw)
        assert self.ledgers[device].promised_bytes == promised

    @rule(step=st.sampled_from([1, 10, 400, MAX_AGE_NS]))
    def time_passes(self, step: int) -> None:
        self.now += step

    @rule(device=devices, lost=st.booleans(), base=st.integers(0, 20))
    def worker_restarts(self, device: str, lost: bool, base: int) -> None:
        self.ledgers[device].set_base(base)
        self.oracles[device].base = base
        if lost:
            self.ledgers[device].forget_sample()
            self.oracles[device].taken = None

    @rule(
        device=devices,
        lease=lease_names,
        size=some_bytes,
        park=st.booleans(),
        ttl=st.none() | ttls,
        sampled=mostly,
    )
    def grant(
        self, device: str, lease: str, size: int, park: bool, ttl: int | None, sampled: bool
    ) -> None:
        ledger, oracle = self.ledgers[device], self.oracles[device]
        if sampled:
            self.sample(device, oracle.raw)
        self.expire(device)
        key = LeaseKey("p", lease)
        if lease in oracle.leases:
            with pytest.raises(AlreadyExists):
                ledger.grant_lease(key, size, self.now, park=park)
            return
        fits = oracle.grants(size, park)
        answer = ledger.grant_lease(key, size, self.now, park=park)
        if oracle.blind(self.now):
            assert isinstance(answer, Deny)
            assert answer.code is DenyCode.STALE_SAMPLE
        elif fits:
            assert isinstance(answer, Lease)
            oracle.grant(lease, size, park)
            leased = ledger.leases_bytes if park else ledger.promised_bytes - ledger.base_bytes
            most = ledger.cap_bytes - ledger.base_bytes - ledger.foreign_bytes
            assert leased <= most
            if ttl is not None:
                self.hold(device, lease, ttl)
        else:
            assert isinstance(answer, Deny)
            assert answer.code is DenyCode.CAP
            assert answer.short_by_bytes > 0

    def hold(self, device: str, lease: str, ttl: int) -> None:
        held = self.ledgers[device].hold_lease(LeaseKey("p", lease), ttl, self.now)
        assert held is not None
        assert held.expires_ns == self.now + ttl
        self.oracles[device].held(lease, self.now + ttl)

    @precondition(lambda self: any(oracle.leases for oracle in self.oracles.values()))
    @rule(device=devices, lease=lease_names, ttl=ttls)
    def hold_or_renew(self, device: str, lease: str, ttl: int) -> None:
        self.expire(device)
        if lease in self.oracles[device].leases:
            self.hold(device, lease, ttl)
        else:
            key = LeaseKey("p", lease)
            assert self.ledgers[device].hold_lease(key, ttl, self.now) is None

    @precondition(lambda self: any(oracle.leases for oracle in self.oracles.values()))
    @rule(device=devices, lease=lease_names, expire_first=st.booleans())
    def release_lease(self, device: str, lease: str, expire_first: bool) -> None:
        ledger, oracle = self.ledgers[device], self.oracles[device]
        if expire_first:
            self.expire(device)
            ledger.expire(self.now)
        before = ledger.promised_bytes + ledger.foreign_bytes
        key = LeaseKey("p", lease)
        assert ledger.release_lease(key) is (lease in oracle.leases)
        oracle.leases.pop(lease, None)
        assert ledger.release_lease(key) is False
        assert ledger.promised_bytes + ledger.foreign_bytes <= before

    # --- what always holds ------------------------------------------------------------------

    @invariant()
    def agrees_with_the_oracle(self) -> None:
        if not hasattr(self, "ledgers"):
            return
        for device, ledger in self.ledgers.items():
            oracle = self.oracles[device]
            ledger.validate_state()
            assert ledger.promised_bytes == oracle.promised()
            assert ledger.foreign_bytes == oracle.foreign()
            left = oracle.cap - oracle.foreign() - oracle.lease_bytes()
            assert ledger.budget_bytes == max(0, left)
            totals = ledger.totals()
            assert totals.host_promised_bytes == oracle.host() <= oracle.host_cap
            assert totals.over_bytes == max(0, oracle.promised() + oracle.foreign() - oracle.cap)
            sizes = {line.key: line.bytes for line in ledger.lines()}
            for model, size in oracle.weights.items():
                assert sizes[f"weights:{model}"] == size.value()
            for (model, kv), _ in oracle.pools.items():
                assert sizes[f"pool:{model}@{kv}"] == oracle.pool_bytes((model, kv))
            assert set(ledger.agents()) == set(oracle.members)
            for agent in ledger.agents():
                fits = need_bytes(ledger, agent) <= ledger.room_bytes
                assert fits == (obstacle(ledger, agent) == "")


def state(ledger: Ledger) -> tuple[object, ...]:
    """All that a ledger shows."""
    pools = [ledger.pool(model, kv) for model in MODELS for kv in KV_TYPES]
    return ledger.totals(), ledger.lines(), ledger.host_lines(), pools, list(ledger.agents())


Ledgers.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    suppress_health_check=[*HealthCheck.__members__.values()],
)
TestLedgers = Ledgers.TestCase
