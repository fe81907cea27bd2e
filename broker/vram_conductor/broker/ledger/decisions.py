"""What a ledger answers: value objects, with all the numbers. Pure.

``Admit | Stale | Deny`` answer the question; ``Reservation | Stale | Deny`` come from asking and
taking in one step. ``refusal`` turns a :class:`Deny` into words and into an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.protocol.values import AgentKey, Line, PoolShape


class DenyCode(StrEnum):
    """Why a ledger refused (``details.code`` of VRAM_LEDGER_DENY)."""

    CAP = "CAP"
    """The device's cap: promised + foreign would exceed it."""
    HOST = "HOST"
    """The host ledger's cap: no room for the agent's parked state."""
    FILE = "FILE"
    """The model file alone is larger than the cap (stage 0, no estimate needed)."""
    NO_ESTIMATE = "NO_ESTIMATE"
    """The worker could not tell what it would take."""
    STALE_SAMPLE = "STALE_SAMPLE"
    """No sample of the device's memory, or one that is too old."""
    MEASURED = "MEASURED"
    """What was loaded is larger than its estimate, and does not fit."""
    NO_DEVICE = "NO_DEVICE"
    """It has no worker now."""
    AGENTS = "AGENTS"
    """Too many agents."""


_ABOUT_BYTES = frozenset({DenyCode.CAP, DenyCode.HOST, DenyCode.FILE, DenyCode.MEASURED})


@dataclass(frozen=True, slots=True)
class Admit:
    """It fits.

    Attributes:
        device: where.
        requested_bytes: growth of the device's promise.
        free_bytes: cap - promised - foreign after it.
        shares_weights: the model's weights are promised there already.
    """

    device: str
    requested_bytes: int
    free_bytes: int
    shares_weights: bool


@dataclass(frozen=True, slots=True)
class Stale:
    """The pool's shape changed since the estimate: ask for ``shape`` and come again."""

    device: str
    shape: PoolShape


@dataclass(frozen=True, slots=True)
class Deny:
    """It does not fit, or nobody can tell. Nothing has changed.

    Device bytes, except for code HOST, where max, allocated and requested are the host
    ledger's. ``requested + allocated + foreign - max = short_by`` where bytes are the reason.

    Attributes:
        code: why.
        device: id of the device; empty for AGENTS.
        ledger_max_bytes: the cap.
        ledger_allocated_bytes: promised before the request.
        requested_bytes: growth of the promise.
        foreign_bytes: what others use.
        lines: all lines of the ledger that refused.
        claim: the request; None where there was none (leases, FILE, NO_ESTIMATE).
        never: it would not fit even if the device were empty.
        largest_n_ctx_that_fits: filled in after the fit probe
            (``dataclasses.replace``); None: not known, 0: no context fits.
        agents: how many agents the ledger holds.
        leases_bytes: the part of what is allocated that leases hold.
        admission_percent: share of the capacity that may be promised.
        sample_age_ms: age of the memory sample; None: there is none.
        note: the cause in words, for the codes whose numbers do not tell it.
    """

    code: DenyCode
    device: str
    ledger_max_bytes: int = 0
    ledger_allocated_bytes: int = 0
    requested_bytes: int = 0
    foreign_bytes: int = 0
    lines: tuple[Line, ...] = ()
    claim: Claim | None = None
    never: bool = False
    largest_n_ctx_that_fits: int | None = None
    agents: int = 0
    leases_bytes: int = 0
    admission_percent: int = 100
    sample_age_ms: int | None = None
    note: str = ""

    @property
    def about_bytes(self) -> bool:
        """Whether bytes were the reason."""
        return self.code in _ABOUT_BYTES

    @property
    def short_by_bytes(self) -> int:
        """Bytes missing; 0 where bytes were not the reason."""
        if not self.about_bytes:
            return 0
        need = self.requested_bytes + self.ledger_allocated_bytes + self.foreign_bytes
        return max(0, need - self.ledger_max_bytes)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bytes held for a load in progress. Ends in commit, rollback or release of the agent.

    Attributes:
        id: unique within the ledger's life: an old one never names a new reservation.
        device: the ledger it belongs to.
        claim: what is held.
        requested_bytes: growth of the promise.
    """

    id: int
    device: str
    claim: Claim
    requested_bytes: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A reservation has become the agent's lines.

    Attributes:
        agent: whose.
        promised_bytes: the device's promise now.
        unmeasured: some of its lines are still estimates.
    """

    agent: AgentKey
    promised_bytes: int
    unmeasured: bool


class LeaseKey(NamedTuple):
    """Whose lease, and which."""

    principal: str
    name: str

    def __str__(self) -> str:
        return f"{self.principal}/{self.name}"


@dataclass(frozen=True, slots=True)
class Lease:
    """Device memory promised to a program outside.

    Attributes:
        park: it was granted although agents were promised the bytes.
        expires_ns: when it ends; None while room is being made for it.
    """

    key: LeaseKey
    bytes: int
    park: bool
    expires_ns: int | None = None


Decision = Admit | Stale | Deny
