"""Which device takes an agent, and what would fit where none does. Pure.

The caller asks every candidate device's worker for an estimate, then :func:`place` decides over
all ledgers at once. It reserves at once afterwards (``Ledger.reserve``, same tick).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vram_conductor.broker.claims import Claim
from vram_conductor.broker.decisions import Admit, Deny, Stale
from vram_conductor.broker.ledger import Ledger
from vram_conductor.protocol.errors import ErrorInfo


@dataclass(frozen=True, slots=True)
class Refusal:
    """No device takes the agent. ``denies``: one for every candidate, the closest first."""

    denies: tuple[Deny, ...]


def candidates(ledgers: Mapping[str, Ledger], device: str | None) -> tuple[str, ...] | Refusal:
    """Ids of the devices to ask: the given one, or all. Refusal (NO_DEVICE) if there is none."""
    raise NotImplementedError


def check_agents(total: int, of_principal: int) -> Deny | None:
    """AGENTS if one more agent would exceed ``AGENTS_MAX`` or ``AGENTS_PER_PRINCIPAL_MAX``."""
    raise NotImplementedError


def check_file(ledger: Ledger, file_bytes: int) -> Deny | None:
    """Stage 0. FILE if the model file alone is larger than the cap: needs no estimate."""
    raise NotImplementedError


def no_estimate(ledger: Ledger, cause: ErrorInfo | None) -> Deny:
    """NO_ESTIMATE: the worker could not tell (``cause``: what it answered; None: it did not)."""
    raise NotImplementedError


def place(
    ledgers: Mapping[str, Ledger], requests: Mapping[str, Claim | Deny], now_ns: int
) -> Admit | Stale | Refusal:
    """Choose the device. ``requests``: per candidate the claim, or why there is none.

    A device that has the model already is preferred (one copy of the weights), then the one
    with the fewest free bytes left (best fit), then the first by name. If any candidate's
    estimate is stale, that is the answer: the choice needs all numbers.
    """
    raise NotImplementedError


def fit_n_ctx(
    ledger: Ledger, claim: Claim, fit_cells: int | None, n_ctx_train: int | None = None
) -> int:
    """The largest n_ctx with which the claim would be admitted, in tokens; 0: none.

    Args:
        fit_cells: the worker's answer to ``Ledger.fit_bytes``; None: cells are no limit.
        n_ctx_train: the model's limit, if it is one.

    The other members' share of the pool's cells, the slots and the host ledger are taken into
    account. Where the host ledger limits, the state is scaled in proportion to n_ctx: ask for
    an estimate of the result, and call again with that claim until the answer stays.
    """
    raise NotImplementedError
