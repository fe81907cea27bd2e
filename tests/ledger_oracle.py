"""The ledger's rules once more, counted naively: plain lists, and loops at every question.

It shares no code with the ledger but the value types.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.protocol.values import AgentKey, LedgerMode, PoolShape

PoolName = tuple[str, str]
ShapeKey = tuple[int, int]


@dataclass
class Size:
    """What the oracle knows of one size."""

    open: list[int] = field(default_factory=list)
    settled: int | None = None
    measured: bool = False

    def value(self) -> int:
        if self.measured:
            assert self.settled is not None
            return self.settled
        return max([self.settled or 0, *self.open])

    def known(self) -> bool:
        return self.settled is not None or bool(self.open)

    def settle(self, estimate: int) -> None:
        self.open.remove(estimate)
        self.keep(estimate)

    def keep(self, estimate: int) -> None:
        if not self.measured:
            self.settled = max(self.settled or 0, estimate)

    def copy(self) -> Size:
        return Size(list(self.open), self.settled, self.measured)


def inside(a: ShapeKey, b: ShapeKey) -> bool:
    return a[0] <= b[0] and a[1] <= b[1]


@dataclass
class OracleLease:
    """``ends`` is None while it is pending."""

    size: int
    park: bool
    ends: int | None = None


@dataclass
class Oracle:
    """One device, counted naively."""

    mode: LedgerMode
    cap: int
    host_cap: int
    max_age: int
    base: int = 0
    members: dict[AgentKey, tuple[Claim, bool]] = field(default_factory=dict)
    weights: dict[str, Size] = field(default_factory=dict)
    scratch: dict[str, Size] = field(default_factory=dict)
    pools: dict[PoolName, dict[ShapeKey, Size]] = field(default_factory=dict)
    leases: dict[str, OracleLease] = field(default_factory=dict)
    raw: int = 0
    others: int | None = None
    taken: int | None = None

    # --- formulas, straight from the design ---

    def shape(self, pool: PoolName, extra: tuple[int, int] | None = None) -> ShapeKey:
        asked = [(c.n_ctx, c.slots) for c, _ in self.members.values() if name(c) == pool]
        if extra:
            asked.append(extra)
        slots = max(s for _, s in asked)
        padded = sorted(((n + 255) // 256 * 256 for n, _ in asked), reverse=True)
        return sum(padded[: min(len(asked), slots)]), slots

    def pool_bytes(self, pool: PoolName) -> int:
        sizes, now = self.pools[pool], self.shape(pool)

        def at(shape: ShapeKey) -> int:
            return max(size.value() for key, size in sizes.items() if inside(key, shape))

        return at(now) if now in sizes else min(at(k) for k in sizes if inside(now, k))

    def lease_bytes(self, *, held: bool = False, park: bool = False) -> int:
        return sum(
            lease.size
            for lease in self.leases.values()
            if not (held and lease.ends is None) and not (park and not lease.park)
        )

    def promised(self) -> int:
        fixed = (
            self.base
            + self.lease_bytes()
            + sum(self.scratch[model].value() for model, _ in self.pools)
        )
        pools = {pool: self.pool_bytes(pool) for pool in self.pools}
        if self.mode == "reserve":
            weights = sum(x.value() for x in self.weights.values())
            return fixed + weights + max(pools.values(), default=0)
        turns = [self.weights[model].value() + size for (model, _), size in pools.items()]
        return fixed + max(turns, default=0)

    def foreign(self) -> int:
        others = self.raw if self.others is None else self.others
        return self.raw - min(self.lease_bytes(held=True), max(0, self.raw - others))

    def host(self) -> int:
        states = [c.state_bytes for c, _ in self.members.values()]
        return sum(states) + max(states, default=0)

    def blind(self, now: int) -> bool:
        return self.taken is None or now - self.taken > self.max_age

    # --- changes ---

    def expire(self, now: int) -> bool:
        """Whether any lease has."""
        held = len(self.leases)
        self.leases = {n: x for n, x in self.leases.items() if x.ends is None or x.ends > now}
        return len(self.leases) < held

    def sample(self, raw: int, now: int) -> None:
        leases = self.lease_bytes(held=True)
        if not leases or self.others is None:
            self.others = max(0, raw - leases)
        self.others = min(self.others, raw)
        self.raw, self.taken = raw, now

    def grants(self, size: int, park: bool) -> bool:
        taken = self.base + self.lease_bytes() if park else self.promised()
        return taken + size + self.foreign() <= self.cap

    def grant(self, lease: str, size: int, park: bool) -> None:
        self.leases[lease] = OracleLease(size, park)

    def held(self, lease: str, ends: int) -> None:
        if self.leases[lease].ends is None:
            self.others = self.foreign()
        self.leases[lease].ends = ends

    def hold(self, claim: Claim) -> None:
        self.members[claim.agent] = (claim, True)
        self.weights.setdefault(claim.model, Size()).open.append(claim.weights_bytes)
        self.scratch.setdefault(claim.model, Size()).open.append(claim.scratch_bytes)
        sizes = self.pools.setdefault(name(claim), {})
        sizes.setdefault(key(claim.shape), Size()).open.append(claim.pool_bytes)

    def leave(self, agent: AgentKey) -> None:
        """Release or rollback."""
        claim, is_open = self.members[agent]
        before = self.promised()
        del self.members[agent]
        sizes = self.pools[name(claim)]
        if is_open:
            self.weights[claim.model].open.remove(claim.weights_bytes)
            self.scratch[claim.model].open.remove(claim.scratch_bytes)
            size = sizes[key(claim.shape)]
            size.open.remove(claim.pool_bytes)
            if not size.known():
                del sizes[key(claim.shape)]
        if not any(name(c) == name(claim) for c, _ in self.members.values()):
            del self.pools[name(claim)]
        if not any(c.model == claim.model for c, _ in self.members.values()):
            del self.weights[claim.model], self.scratch[claim.model]
        after = self.promised()
        if after > before and after + self.foreign() > self.cap:
            sizes.setdefault(key(claim.shape), Size()).keep(claim.pool_bytes)

    def settle(self, claim: Claim) -> None:
        self.members[claim.agent] = (claim, False)
        self.weights[claim.model].settle(claim.weights_bytes)
        self.scratch[claim.model].settle(claim.scratch_bytes)
        sizes = self.pools[name(claim)]
        size = sizes[key(claim.shape)]
        size.settle(claim.pool_bytes)
        for other, known in sizes.items():
            if known.measured and inside(key(claim.shape), other) and not size.measured:
                assert size.settled is not None
                size.settled = min(size.settled, known.value())

    def measure(self, model: str, pool: PoolName, shape: ShapeKey, m: Measured) -> bool:
        """False: refused, and nothing changed."""
        if model not in self.weights:
            return True
        before = self.promised()
        saved = (
            self.weights[model].copy(),
            self.scratch[model].copy(),
            {k: s.copy() for k, s in self.pools.get(pool, {}).items()},
        )
        for size, told in (
            (self.weights[model], m.weights_bytes),
            (self.scratch[model], m.scratch_bytes),
        ):
            if told is not None:
                size.settled, size.measured = told, True
        if m.pool_bytes is not None and pool in self.pools:
            size = self.pools[pool].setdefault(shape, Size())
            size.settled, size.measured = m.pool_bytes, True
        after = self.promised()
        if after > before and after - self.lease_bytes(park=True) + self.foreign() > self.cap:
            self.weights[model], self.scratch[model] = saved[0], saved[1]
            if pool in self.pools:
                self.pools[pool] = saved[2]
            return False
        known = self.pools.get(pool, {}).get(shape)
        if known and known.measured:
            for other, size in self.pools[pool].items():
                if inside(other, shape) and not size.measured and size.settled is not None:
                    size.settled = min(size.settled, known.value())
        return True

    def expect(self, claim: Claim, now: int, returning: bool = False) -> str:
        """What ``reserve`` must say."""
        if self.blind(now):
            return "STALE_SAMPLE"
        if self.shape(name(claim), (claim.n_ctx, claim.slots)) != key(claim.shape):
            return "stale"
        trial = Oracle(self.mode, self.cap, self.host_cap, self.max_age)
        trial.__dict__.update(deep(self.__dict__))
        trial.hold(claim)
        promised = trial.promised() - (self.lease_bytes(park=True) if returning else 0)
        if promised + self.foreign() > self.cap:
            return "CAP"
        return "HOST" if trial.host() > self.host_cap else "admit"


def deep(fields: dict[str, Any]) -> dict[str, Any]:
    copied = dict(fields)
    copied["members"] = dict(fields["members"])
    copied["leases"] = {k: replace(x) for k, x in fields["leases"].items()}
    copied["weights"] = {k: s.copy() for k, s in fields["weights"].items()}
    copied["scratch"] = {k: s.copy() for k, s in fields["scratch"].items()}
    copied["pools"] = {p: {k: s.copy() for k, s in x.items()} for p, x in fields["pools"].items()}
    return copied


def name(claim: Claim) -> PoolName:
    return claim.model, claim.kv_type


def key(shape: PoolShape) -> ShapeKey:
    return shape.cells, shape.slots
