"""What is known when a device has less free memory than the budget says. *Pure.*

Others may take memory between two samples: then a wake is refused although the ledger has room.
Until the broker has heard of it and sends a new budget, the worker goes by what the device said.
"""

from __future__ import annotations

from dataclasses import dataclass

LASTS_NS = 250_000_000
"""After this time it is tried again, should no new budget have come."""


@dataclass(frozen=True)
class Shortage:
    """A refusal.

    Attributes:
        budget_bytes: the budget at the time; with another one the shortage is over.
        ceiling_bytes: what was resident, and what the device had free beside that.
        since_ns: when.
    """

    budget_bytes: int
    ceiling_bytes: int
    since_ns: int

    def limit(self, budget_bytes: int, now_ns: int) -> int:
        """What may be resident now."""
        if budget_bytes != self.budget_bytes or now_ns >= self.since_ns + LASTS_NS:
            return budget_bytes
        return min(budget_bytes, self.ceiling_bytes)
