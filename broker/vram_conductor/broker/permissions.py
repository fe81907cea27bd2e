"""What a role may ask for, and how much a principal may have (*pure*)."""

from __future__ import annotations

from vram_conductor.broker.agents.estimates import Answer, Inquiry
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Admit
from vram_conductor.broker.ledger.refusal import human_bytes
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.protocol.drain import DrainDevice
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    ErrorInfo,
    PermissionDenied,
    Unauthenticated,
    error_from_info,
)
from vram_conductor.protocol.keys import Quota
from vram_conductor.protocol.messages import (
    Bye,
    ClientMessage,
    Lease,
    List,
    Ping,
    Status,
    Unregister,
)

_LOOKS = (List, Status, Ping, Bye)
"""All that an observer may send, once it has said HELLO."""

_CURES = {
    "agents": "unregister one",
    "queued_jobs": "wait until one has begun",
    "vram_bytes": "unregister an agent, release a lease, or ask for less",
    "kv_bytes": "unregister an agent, or ask for a smaller n_ctx or kv_type",
}

NO_QUOTA = Quota()


def revoked() -> Unauthenticated:
    """The key was taken off the list while its holder was connected."""
    return Unauthenticated(
        "key_revoked",
        "this key was revoked while it was in use; get another one from whoever runs the broker "
        "(conductor keys new)",
    )


def check_role(session: Session, message: ClientMessage) -> None:
    """Raises PermissionDenied ``role_denied``."""
    names = message.principal if isinstance(message, Unregister | Lease) else None
    if names not in (None, session.principal) or isinstance(message, DrainDevice):
        may, needed = session.role == "admin", "admin"
    else:
        may, needed = session.role in ("owner", "admin") or isinstance(message, _LOOKS), "owner"
    if may:
        return
    name = str(message.__struct_config__.tag)
    raise PermissionDenied(
        "role_denied",
        f"a key with the role {session.role} may not send this {name}; use one with the role "
        f"{needed}",
        role=session.role,
        request=name,
    )


def device_denied(devices: tuple[str, ...], device: str) -> ErrorInfo | None:
    """Why a worker with a key for ``devices`` (none: any) may not serve ``device``, if so."""
    if not devices or device in devices:
        return None
    return ErrorInfo(
        Code.PERMISSION_DENIED,
        "device_denied",
        f"this worker's key is for {', '.join(devices)}, not for {device}; start it with --device "
        f"{devices[0]}, or make a key: conductor keys new NAME --role worker --device {device}",
        details={"device": device, "devices": list(devices)},
    )


def quota_of(state: State, principal: str) -> Quota:
    """The principal's own limits."""
    return state.quotas.get(principal, NO_QUOTA)


def check_quota(
    principal: str, field: str, used: int, more: int, limit: int | None, retry_after_ms: int = 0
) -> None:
    """Raises ResourceExhausted ``quota_exceeded`` where ``used`` + ``more`` is above the limit,
    OutOfRange ``quota_exceeded`` where ``more`` alone is."""
    if limit is None or used + more <= limit:
        return
    never = more > limit
    code = Code.OUT_OF_RANGE if never else Code.RESOURCE_EXHAUSTED
    raise error_from_info(
        ErrorInfo(
            code,
            "quota_exceeded",
            f"{principal} may have {_said(field, limit)}, has {_amount(field, used)}, and asks "
            f"for {_amount(field, more)} more; {_CURES[field]}, or have the quota raised",
            retryable=not never,
            retry_after_ms=retry_after_ms or None,
            details={"field": field, "limit": limit, "used": used, "requested": more},
        )
    )


def _amount(field: str, value: int) -> str:
    return human_bytes(value) if field.endswith("_bytes") else str(value)


def _said(field: str, limit: int) -> str:
    """``200 MiB of vram_bytes``, ``4 agents``: the field is named as ``details`` has it."""
    of = " of" if field.endswith("_bytes") else ""
    return f"{_amount(field, limit)}{of} {field}"


def within_quota(state: State, inquiry: Inquiry, answer: Answer) -> Answer:
    """The ledger's answer to a REGISTER; ``quota_exceeded`` where it would admit the agent and
    its principal may not have so much."""
    quota = quota_of(state, inquiry.key.principal)
    if not isinstance(answer, Admit) or quota is NO_QUOTA:
        return answer
    principal = inquiry.key.principal
    vram_bytes, kv_bytes = held_bytes(state, principal)
    claim = inquiry.claim(answer.device)
    more_bytes = held_bytes(state, principal, answer.device, claim)[0] - vram_bytes
    try:
        check_quota(principal, "vram_bytes", vram_bytes, more_bytes, quota.vram_bytes)
        check_quota(principal, "kv_bytes", kv_bytes, claim.state_bytes, quota.kv_bytes)
    except ConductorError as error:
        return error.info
    return answer


def held_bytes(
    state: State, principal: str, device: str = "", claim: Claim | None = None
) -> tuple[int, int]:
    """What a principal has, or would have with ``claim`` on ``device``: (bytes of device memory,
    bytes of KV). What it shares with others counts in whole: it would stay if they left."""
    vram_bytes = sum(
        tenure.size_bytes for key, tenure in state.leases.items() if key.principal == principal
    )
    kv_bytes = 0
    for name, each in state.devices.items():
        ledger = each.ledger
        own = [ledger.claim_of(key) for key in ledger.agents() if key.principal == principal]
        claims = [item for item in own if item is not None]
        models = {
            item.model: (ledger.weights_bytes(item.model) or 0) + ledger.scratch_bytes(item.model)
            for item in claims
        }
        pools = {
            item.pool: pool.bytes
            for item in claims
            if (pool := ledger.pool(item.model, item.kv_type)) is not None
        }
        if claim is not None and name == device:
            asked_bytes = claim.weights_bytes + claim.scratch_bytes
            models[claim.model] = max(models.get(claim.model, 0), asked_bytes)
            pools[claim.pool] = max(pools.get(claim.pool, 0), claim.pool_bytes)
            kv_bytes += claim.state_bytes
        vram_bytes += sum(models.values()) + sum(pools.values())
        kv_bytes += sum(item.state_bytes for item in claims)
    return vram_bytes, kv_bytes
