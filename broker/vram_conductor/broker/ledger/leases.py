"""Device memory promised to programs outside, each until a time. Pure."""

from __future__ import annotations

from dataclasses import replace

from vram_conductor.broker.ledger.claims import check_bytes, check_range
from vram_conductor.broker.ledger.decisions import Lease
from vram_conductor.broker.ledger.ordered import Multiset
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import Line

TTL_NS_MAX = 1 << 62


def make_lease(name: str, lease_bytes: int, ttl_ns: int | None, now_ns: int) -> Lease:
    """A lease that ends ``ttl_ns`` from now (None: never).

    Raises:
        InvalidArgument: ``bad_lease``, ``bad_bytes``, ``bad_value``.
    """
    if not name or len(name) > limits.NAME_CHARS_MAX:
        raise InvalidArgument(
            "bad_lease", f"a lease's name has 1 to {limits.NAME_CHARS_MAX} characters"
        )
    check_bytes("lease_bytes", lease_bytes)
    return Lease(name, lease_bytes, expiry(ttl_ns, now_ns))


def expiry(ttl_ns: int | None, now_ns: int) -> int | None:
    """When a lease of ``ttl_ns`` ends. Raises InvalidArgument ``bad_value``."""
    return None if ttl_ns is None else now_ns + check_range("ttl_ns", ttl_ns, 1, TTL_NS_MAX)


class Leases:
    """Current leases of one device, and the names of those that expired unnoticed."""

    __slots__ = ("_by_name", "_expired", "_expiries", "total_bytes")

    def __init__(self) -> None:
        self._by_name: dict[str, Lease] = {}
        self._expiries: Multiset[tuple[int, str]] = Multiset()
        self._expired: list[str] = []
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: str) -> Lease | None:
        return self._by_name.get(name)

    def add(self, lease: Lease) -> None:
        """A new lease; its name must be free."""
        assert lease.name not in self._by_name
        self._by_name[lease.name] = lease
        self.total_bytes += lease.bytes
        if lease.expires_ns is not None:
            self._expiries.add((lease.expires_ns, lease.name))

    def remove(self, name: str) -> bool:
        lease = self._by_name.pop(name, None)
        if lease is None:
            return False
        self.total_bytes -= lease.bytes
        if lease.expires_ns is not None:
            self._expiries.remove((lease.expires_ns, name))
        return True

    def renew(self, name: str, expires_ns: int | None) -> Lease | None:
        """Move the end of a lease; None if it is not here."""
        lease = self._by_name.get(name)
        if lease is None:
            return None
        self.remove(name)
        renewed = replace(lease, expires_ns=expires_ns)
        self.add(renewed)
        return renewed

    def sweep(self, now_ns: int) -> None:
        """Drop what has expired: a lease ends at ``expires_ns``, not after it."""
        while (first := self._expiries.first()) is not None and first[0] <= now_ns:
            self.remove(first[1])
            self._expired.append(first[1])

    def take_expired(self) -> list[str]:
        """Names that :meth:`sweep` dropped since the last call."""
        expired, self._expired = self._expired, []
        return expired

    def lines(self) -> list[Line]:
        return [Line(f"lease:{lease.name}", lease.bytes) for lease in self._by_name.values()]

    def validate_state(self) -> None:
        """Recount. Raises AssertionError: our bug."""
        leases = self._by_name.values()
        assert self.total_bytes == sum(lease.bytes for lease in leases)
        ends = sorted((x.expires_ns, x.name) for x in leases if x.expires_ns is not None)
        assert list(self._expiries.entries()) == ends
