"""What keeps an agent that is admitted from running now: leases, or others' use. Pure."""

from __future__ import annotations

from vram_conductor.broker.ledger.accounts import Accounts
from vram_conductor.broker.ledger.decisions import Lease
from vram_conductor.protocol.values import AgentKey

FOREIGN = "foreign"
"""Others use so much of the device that no lease's end would help."""


def need_bytes(accounts: Accounts, agent: AgentKey) -> int:
    """What the agent takes if it has the device for itself: base, weights, scratch, pool. 0: it
    is not here."""
    claim = accounts.claim_of(agent)
    if claim is None:
        return 0
    pool = accounts.pool(claim.model, claim.kv_type)
    weights = accounts.weights_bytes(claim.model)
    assert pool is not None
    assert weights is not None
    return accounts.base_bytes + weights + accounts.scratch_bytes(claim.model) + pool.bytes


def obstacle(accounts: Accounts, agent: AgentKey) -> Lease | str:
    """Empty: the agent fits at least alone. A lease: the one with whose end it will, if they end
    in their order; or FOREIGN."""
    if not accounts.over_bytes:
        return ""  # all that is promised fits, so each agent does; asked once per waiting job
    room = accounts.room_bytes
    need = need_bytes(accounts, agent)
    if need <= room or not need:
        return ""
    for lease in accounts.leases():
        room += lease.bytes
        if need <= room:
            return lease
    return FOREIGN
