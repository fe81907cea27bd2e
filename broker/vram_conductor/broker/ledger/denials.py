"""A ledger's refusals, with the numbers of the moment. Pure."""

from __future__ import annotations

from dataclasses import replace

from vram_conductor.broker.ledger.accounts import Accounts
from vram_conductor.broker.ledger.claims import NOTHING_MEASURED, Claim, Measured
from vram_conductor.broker.ledger.decisions import Deny, DenyCode, Lease
from vram_conductor.broker.ledger.host import alone_bytes


def deny(
    accounts: Accounts,
    code: DenyCode,
    now_ns: int | None,
    *,
    requested_bytes: int = 0,
    claim: Claim | None = None,
    never: bool = False,
    note: str = "",
) -> Deny:
    """A refusal by the device's own ledger."""
    return Deny(
        code=code,
        device=accounts.device,
        ledger_max_bytes=accounts.cap_bytes,
        ledger_allocated_bytes=accounts.promised_bytes,
        requested_bytes=max(0, requested_bytes),
        foreign_bytes=accounts.foreign_bytes,
        lines=accounts.lines(),
        claim=claim,
        never=never,
        agents=len(accounts),
        leases_bytes=accounts.leases_bytes,
        admission_percent=accounts.spec.admission_percent,
        sample_age_ms=None if now_ns is None else accounts.sample_age_ms(now_ns),
        note=note,
    )


def deny_claim(
    accounts: Accounts,
    code: DenyCode,
    now_ns: int | None,
    growth_bytes: int,
    claim: Claim,
    measured: Measured = NOTHING_MEASURED,
) -> Deny:
    """CAP or MEASURED: the promise would grow by ``growth_bytes``."""
    never = accounts.alone_bytes(claim, measured) > accounts.cap_bytes
    return deny(accounts, code, now_ns, requested_bytes=growth_bytes, claim=claim, never=never)


def deny_lease(accounts: Accounts, now_ns: int, lease: Lease, taken_bytes: int) -> Deny:
    """CAP, for a lease. ``taken_bytes``: what is in its way; agents are not, where they park."""
    refused = deny(
        accounts,
        DenyCode.CAP,
        now_ns,
        requested_bytes=lease.bytes,
        never=accounts.base_bytes + lease.bytes > accounts.cap_bytes,
        note=f"lease {lease.key.name}",
    )
    return replace(
        refused,
        ledger_allocated_bytes=taken_bytes,
        agents=0 if lease.park else refused.agents,
    )


def deny_host(accounts: Accounts, now_ns: int, claim: Claim) -> Deny:
    """HOST: the numbers are the host ledger's."""
    cap = accounts.spec.host_cap_bytes
    return Deny(
        code=DenyCode.HOST,
        device=accounts.device,
        ledger_max_bytes=cap,
        ledger_allocated_bytes=accounts.host_promised_bytes,
        requested_bytes=accounts.host_growth_bytes(claim.state_bytes),
        lines=accounts.host_lines(),
        claim=claim,
        never=alone_bytes(claim.state_bytes) > cap,
        agents=len(accounts),
        sample_age_ms=accounts.sample_age_ms(now_ns),
    )


def deny_blind(accounts: Accounts, now_ns: int, claim: Claim | None) -> Deny | None:
    """STALE_SAMPLE if nobody knows what others use of the device: fail closed."""
    age_ms, limit_ms = accounts.sample_age_ms(now_ns), accounts.spec.sample_max_age_ns // 1_000_000
    if age_ms is None:
        note = "no memory sample from its worker yet"
    elif accounts.sample_is_stale(now_ns):
        note = f"the last memory sample is {age_ms} ms old, the limit is {limit_ms} ms"
    else:
        return None
    return deny(accounts, DenyCode.STALE_SAMPLE, now_ns, claim=claim, note=note)
