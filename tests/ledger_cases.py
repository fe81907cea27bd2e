"""Ledgers and claims for tests, in MiB."""

from __future__ import annotations

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Deny, Reservation
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol.values import AgentKey, KVType, LedgerMode

MIB = 1 << 20
NOW = 1_000_000_000


def agent(name: str) -> AgentKey:
    return AgentKey("local", name)


def make_ledger(cap: int = 1000, mode: LedgerMode = "reserve", host: int = 1000) -> Ledger:
    spec = DeviceSpec("cpu", "cpu", mode, cap * MIB, host_cap_bytes=host * MIB)
    ledger = Ledger(spec)
    ledger.observe(0, NOW)
    return ledger


def make_claim(
    ledger: Ledger,
    name: str,
    model: str = "m",
    *,
    weights: int = 200,
    pool: int = 100,
    n_ctx: int = 1024,
    slots: int = 1,
    kv_type: KVType = "f16",
    state: int = 10,
) -> Claim:
    """A claim with an estimate for the shape that the ledger asks for."""
    shape = ledger.shape_with(model, kv_type, agent(name), n_ctx, slots)
    return Claim(
        agent=agent(name),
        model=model,
        kv_type=kv_type,
        n_ctx=n_ctx,
        slots=slots,
        shape=shape,
        weights_bytes=weights * MIB,
        pool_bytes=pool * MIB,
        state_bytes=state * MIB,
    )


def reserve(ledger: Ledger, claim: Claim) -> Reservation:
    answer = ledger.reserve(claim, NOW)
    assert isinstance(answer, Reservation), answer
    return answer


def refuse(ledger: Ledger, claim: Claim, now_ns: int = NOW) -> Deny:
    answer = ledger.reserve(claim, now_ns)
    assert isinstance(answer, Deny), answer
    return answer


def lines(ledger: Ledger) -> dict[str, int]:
    return {line.key: line.bytes // MIB for line in ledger.lines()}
