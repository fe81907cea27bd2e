"""What a ledger shows of itself: sums and pools, as value objects. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.protocol.values import KVType, PoolShape


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
        over_bytes: promised + foreign above the cap (foreign use grew, or the device shrank);
            nothing is admitted while it is > 0.
        budget_bytes: what the worker may use: cap - foreign, at least 0.
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
