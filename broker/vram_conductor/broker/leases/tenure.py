"""One lease as the broker knows it (*pure*): what was asked for, who waits, how long it lasts."""

from __future__ import annotations

from dataclasses import dataclass, field

from vram_conductor.broker.ledger.decisions import LeaseKey
from vram_conductor.protocol.messages import Lease
from vram_conductor.protocol.status import LeaseStatus

MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class Tenure:
    """A lease, pending or held.

    Attributes:
        device: where it is.
        since_ns: when it was asked for first.
        expires_ns: when it ends; None while it is pending.
        op: of the BUDGET that makes room for it.
        confirmed_ns: when the worker had carried that out; None: not yet.
        waiters: (peer, rid) of every LEASE that gets the answer.
        owners: ephemeral leases: the sessions (peers) that keep it alive.
    """

    key: LeaseKey
    device: str
    size_bytes: int
    ttl_s: int
    park: bool
    ephemeral: bool
    since_ns: int
    expires_ns: int | None = None
    op: int = 0
    confirmed_ns: int | None = None
    waiters: dict[tuple[bytes, bytes], None] = field(default_factory=dict)
    owners: set[bytes] = field(default_factory=set)

    @property
    def ttl_ns(self) -> int:
        return self.ttl_s * NS_PER_S

    def is_over(self, now_ns: int) -> bool:
        """Whether its time is over, also where its timer has not been looked at yet."""
        return self.expires_ns is not None and self.expires_ns <= now_ns

    def differences(self, message: Lease) -> dict[str, list[object]]:
        """Which parameters of a repeated LEASE are others than the lease's: name → [the lease's,
        the message's]."""
        pairs: list[tuple[str, object, object]] = [
            ("bytes", self.size_bytes, message.lease_bytes),
            ("park", self.park, message.park),
            ("ephemeral", self.ephemeral, message.ephemeral),
        ]
        if message.device is not None:
            pairs.append(("device", self.device, message.device))
        return {name: [mine, theirs] for name, mine, theirs in pairs if mine != theirs}

    def status(self, now_ns: int) -> LeaseStatus:
        """As STATUS shows it."""
        left = None if self.expires_ns is None else max(0, self.expires_ns - now_ns) // MS
        return LeaseStatus(
            principal=self.key.principal,
            name=self.key.name,
            device=self.device,
            bytes=self.size_bytes,
            state="pending" if left is None else "held",
            ttl_s=self.ttl_s,
            left_ms=left,
            park=self.park,
            ephemeral=self.ephemeral,
        )
