"""What was really allocated, against the budget."""

from __future__ import annotations

import logging

import msgspec

from vram_conductor.protocol.errors import LEDGER_DENY, LedgerDeny
from vram_conductor.worker.residency import Residency

log = logging.getLogger(__name__)


def check_measured(
    residency: Residency, line: str, promised_bytes: int, measured_bytes: int
) -> None:
    """An estimate that was too low must not push the device beyond the budget.

    Raises:
        LedgerDeny: code ``MEASURED``; the caller frees what it has just allocated.
    """
    resident, budget = residency.resident_bytes(), residency.budget_bytes
    if resident <= budget:
        return
    log.error("%s takes %d bytes, %d were estimated", line, measured_bytes, promised_bytes)
    details = {
        "code": "MEASURED",
        "line": line,
        "requested_bytes": promised_bytes,
        "measured_bytes": measured_bytes,
        "resident_bytes": resident,
        "budget_bytes": budget,
    }
    error = LedgerDeny(
        LEDGER_DENY,
        f"{line} was estimated at {promised_bytes} bytes and took {measured_bytes}: "
        f"{resident} bytes would be resident and the budget is {budget}; "
        "register it with a smaller n_ctx",
        retryable=True,
    )
    error.info = msgspec.structs.replace(error.info, details=details)
    raise error
