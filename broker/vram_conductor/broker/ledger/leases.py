"""Device memory promised to programs outside, each until a time. Pure.

A lease is pending from its grant until the room is there; only then does its time run, and only
then can what others use be its holder's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vram_conductor.broker.ledger.claims import check_bytes, check_range
from vram_conductor.broker.ledger.decisions import Lease, LeaseKey
from vram_conductor.broker.ledger.ordered import Multiset
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import Line

TTL_NS_MAX = limits.LEASE_TTL_S_MAX * 1_000_000_000


def make_lease(key: LeaseKey, lease_bytes: int, *, park: bool) -> Lease:
    """A pending lease.

    Raises:
        InvalidArgument: ``bad_lease``, ``bad_bytes``.
    """
    if not key.name or len(key.name) > limits.NAME_CHARS_MAX:
        raise InvalidArgument(
            "bad_lease", f"a lease's name has 1 to {limits.NAME_CHARS_MAX} characters"
        )
    return Lease(key, check_bytes("lease_bytes", lease_bytes), park)


def expiry(ttl_ns: int, now_ns: int) -> int:
    """When a lease of ``ttl_ns`` ends. Raises InvalidArgument ``bad_value``."""
    return now_ns + check_range("ttl_ns", ttl_ns, 1, TTL_NS_MAX)


class Leases:
    """Current leases of one device, and the keys of those that expired unnoticed.

    Attributes:
        total_bytes: of all. ``held_bytes``: of those that are not pending. ``park_bytes``: of
            those for which agents wait.
    """

    __slots__ = ("_by_key", "_expired", "_expiries", "held_bytes", "park_bytes", "total_bytes")

    def __init__(self) -> None:
        self._by_key: dict[LeaseKey, Lease] = {}
        self._expiries: Multiset[tuple[int, LeaseKey]] = Multiset()
        self._expired: list[LeaseKey] = []
        self.total_bytes = 0
        self.held_bytes = 0
        self.park_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._by_key.values())

    def get(self, key: LeaseKey) -> Lease | None:
        return self._by_key.get(key)

    def add(self, lease: Lease) -> None:
        """A new lease; its key must be free."""
        assert lease.key not in self._by_key
        self._by_key[lease.key] = lease
        self._count(lease, lease.bytes)
        if lease.expires_ns is not None:
            self._expiries.add((lease.expires_ns, lease.key))

    def remove(self, key: LeaseKey) -> bool:
        lease = self._by_key.pop(key, None)
        if lease is None:
            return False
        self._count(lease, -lease.bytes)
        if lease.expires_ns is not None:
            self._expiries.remove((lease.expires_ns, key))
        return True

    def _count(self, lease: Lease, change_bytes: int) -> None:
        self.total_bytes += change_bytes
        self.held_bytes += change_bytes if lease.expires_ns is not None else 0
        self.park_bytes += change_bytes if lease.park else 0

    def hold(self, key: LeaseKey, expires_ns: int) -> Lease | None:
        """It is held until then; None if it is not here (any more)."""
        lease = self._by_key.get(key)
        if lease is None:
            return None
        self.remove(key)
        held = replace(lease, expires_ns=expires_ns)
        self.add(held)
        return held

    def sweep(self, now_ns: int) -> None:
        """Drop what has expired: a lease ends at ``expires_ns``, not after it."""
        while (first := self._expiries.first()) is not None and first[0] <= now_ns:
            self.remove(first[1])
            self._expired.append(first[1])

    def take_expired(self) -> list[LeaseKey]:
        """Keys that :meth:`sweep` dropped since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def by_end(self) -> list[Lease]:
        """In the order in which they end; pending ones last."""
        never = 1 << 63
        ends = [(never if x.expires_ns is None else x.expires_ns, x.key) for x in self]
        return [self._by_key[key] for _, key in sorted(ends)]

    def lines(self) -> list[Line]:
        return [
            Line(f"lease:{lease.key}", lease.bytes, detail="" if lease.expires_ns else "pending")
            for lease in self
        ]

    def validate_state(self) -> None:
        """Recount. Raises AssertionError: our bug."""
        leases = self._by_key.values()
        assert self.total_bytes == sum(x.bytes for x in leases)
        assert self.held_bytes == sum(x.bytes for x in leases if x.expires_ns is not None)
        assert self.park_bytes == sum(x.bytes for x in leases if x.park)
        ends = sorted((x.expires_ns, x.key) for x in leases if x.expires_ns is not None)
        assert list(self._expiries.entries()) == ends
