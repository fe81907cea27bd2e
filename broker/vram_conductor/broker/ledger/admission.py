"""Which device takes an agent, and what would fit where none does. Pure.

The caller asks the worker of every candidate device for an estimate of ``Ledger.shape_with``,
then :func:`place` decides over all ledgers at once, and ``Ledger.reserve`` follows in the same
tick. After a refusal, ask for ``Ledger.fit_bytes``, and put :func:`fit_n_ctx` into the deny.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vram_conductor.broker.ledger.claims import Claim, check_bytes, pad_cells
from vram_conductor.broker.ledger.decisions import Admit, Deny, DenyCode, Stale
from vram_conductor.broker.ledger.denials import deny
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Refusal:
    """No device takes the agent. ``denies``: one for every candidate, at least one."""

    denies: tuple[Deny, ...]

    @property
    def closest(self) -> Deny:
        """The deny that is nearest to an admission: a device that could be asked before one that
        could not, it could fit later before it never fits, then the larger context that would
        fit, then the fewer bytes short, then by name."""
        return min(
            self.denies,
            key=lambda d: (
                d.code is DenyCode.NO_DEVICE,
                d.never,
                -(d.largest_n_ctx_that_fits or 0),
                d.short_by_bytes,
                d.device,
            ),
        )


def no_worker(device: str) -> Deny:
    """NO_DEVICE: it is configured and nobody knows whether it would fit there."""
    return Deny(DenyCode.NO_DEVICE, device, note=f"{device} has no worker right now")


def check_agents(total: int, of_principal: int) -> Deny | None:
    """AGENTS if one more agent would exceed ``AGENTS_MAX`` or ``AGENTS_PER_PRINCIPAL_MAX``."""
    if total >= limits.AGENTS_MAX:
        note = f"{total} agents are registered, the limit is {limits.AGENTS_MAX}"
    elif of_principal >= limits.AGENTS_PER_PRINCIPAL_MAX:
        note = (
            f"this principal has {of_principal} agents, "
            f"the limit is {limits.AGENTS_PER_PRINCIPAL_MAX}"
        )
    else:
        return None
    return Deny(DenyCode.AGENTS, "", agents=total, note=note)


def check_file(ledger: Ledger, file_bytes: int) -> Deny | None:
    """Stage 0: FILE if the model file alone is larger than the cap. Needs no estimate.

    Raises:
        InvalidArgument: ``bad_bytes``.
    """
    if check_bytes("file_bytes", file_bytes) <= ledger.cap_bytes:
        return None
    refused = deny(ledger, DenyCode.FILE, None, requested_bytes=file_bytes, never=True)
    return replace(refused, largest_n_ctx_that_fits=0)


def no_estimate(ledger: Ledger, cause: ErrorInfo | None) -> Deny:
    """NO_ESTIMATE: the worker could not tell (``cause``: what it answered; None: it did not)."""
    note = f"{cause.reason}: {cause.message}" if cause else "the worker did not answer in time"
    return deny(ledger, DenyCode.NO_ESTIMATE, None, note=note)


def place(
    ledgers: Mapping[str, Ledger],
    requests: Mapping[str, Claim | Deny],
    now_ns: int,
    *,
    returning: bool = False,
) -> Admit | Stale | Refusal:
    """Choose the device. ``requests``: per candidate, of which there is at least one, the claim,
    or why there is none. ``returning``: as in ``Ledger.decide``.

    A device that has the model already is preferred (one copy of the weights), then the one
    with the fewest free bytes left (best fit), then the first by name. If any candidate's
    estimate is stale, that is the answer: the choice needs all numbers.

    Raises:
        AlreadyExists: ``agent_in_ledger``: a candidate has the agent already.
    """
    admits: list[Admit] = []
    denies: list[Deny] = []
    for device, request in sorted(requests.items()):
        decision: Admit | Stale | Deny
        if isinstance(request, Deny):
            decision = request
        else:
            decision = ledgers[device].decide(request, now_ns, returning=returning)
        if isinstance(decision, Stale):
            return decision
        if isinstance(decision, Admit):
            admits.append(decision)
        else:
            denies.append(decision)
    if admits:
        return min(admits, key=lambda a: (not a.shares_weights, a.free_bytes, a.device))
    return Refusal(tuple(denies))


def fit_n_ctx(
    ledger: Ledger,
    claim: Claim,
    fit_cells: int | None,
    n_ctx_train: int | None = None,
    fixed_bytes: int = 0,
) -> int:
    """The largest n_ctx, up to the claim's own, that would be admitted; in tokens, 0: none.

    Args:
        fit_cells: the worker's answer to ``Ledger.fit_bytes`` at the claim's slots; None: the
            device is not what limits (code HOST).
        n_ctx_train: the model's own limit.
        fixed_bytes: the part of the claim's state that does not depend on n_ctx, if known.

    The other members' share of the pool's cells, the slots and the host ledger are taken into
    account. Where the host ledger limits, the rest of the state is taken in proportion to n_ctx,
    which is too high where more of it is fixed: ask for an estimate of the result, and call again
    with that claim until the answer stays.
    """
    n_ctx = claim.n_ctx if n_ctx_train is None else min(claim.n_ctx, n_ctx_train)
    if fit_cells is not None:
        n_ctx = min(n_ctx, ledger.largest_n_ctx(claim, fit_cells))
    room = ledger.host_largest_state_bytes
    if claim.state_bytes > room:
        fixed_bytes = min(fixed_bytes, room)
        scaled = claim.n_ctx * (room - fixed_bytes) // (claim.state_bytes - fixed_bytes)
        pad = pad_cells(1)
        n_ctx = min(n_ctx, scaled - scaled % pad if scaled >= pad else scaled)
    return max(0, n_ctx)
