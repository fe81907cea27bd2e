"""What a ledger shows of itself: sums and pools, as value objects. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vram_conductor.protocol.values import KVType, PoolShape

if TYPE_CHECKING:
    from vram_conductor.broker.ledger.accounts import Accounts


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool as the ledger holds it: ``bytes`` is promised for ``shape``."""

    model: str
    kv_type: KVType
    shape: PoolShape
    bytes: int
    agents: int
    unmeasured: bool


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums for STATUS, in bytes.

    Attributes:
        free_bytes: cap - promised - foreign, at least 0.
        over_bytes: promised + foreign above the cap (foreign use grew, the device shrank, or
            agents wait for a lease);
            nothing is admitted while it is > 0.
        budget_bytes: what the worker may use: cap - foreign - leases, at least 0.
        leases_bytes: part of ``promised_bytes``.
        agents: reserved and committed; ``open_reservations`` of them are being loaded.
    """

    device: str
    cap_bytes: int
    promised_bytes: int
    foreign_bytes: int
    free_bytes: int
    over_bytes: int
    budget_bytes: int
    base_bytes: int
    leases_bytes: int
    host_cap_bytes: int
    host_promised_bytes: int
    disk_cap_bytes: int
    disk_used_bytes: int
    agents: int
    open_reservations: int

    @classmethod
    def of(cls, accounts: Accounts, disk_used_bytes: int, open_reservations: int) -> Self:
        """The sums of one device now."""
        cap, promised, foreign = (
            accounts.cap_bytes,
            accounts.promised_bytes,
            accounts.foreign_bytes,
        )
        return cls(
            device=accounts.device,
            cap_bytes=cap,
            promised_bytes=promised,
            foreign_bytes=foreign,
            free_bytes=max(0, cap - promised - foreign),
            over_bytes=accounts.over_bytes,
            budget_bytes=accounts.budget_bytes,
            base_bytes=accounts.base_bytes,
            leases_bytes=accounts.leases_bytes,
            host_cap_bytes=accounts.spec.host_cap_bytes,
            host_promised_bytes=accounts.host_promised_bytes,
            disk_cap_bytes=accounts.spec.disk_cap_bytes,
            disk_used_bytes=disk_used_bytes,
            agents=len(accounts),
            open_reservations=open_reservations,
        )
