"""A deny in words and as an error. Pure."""

from __future__ import annotations

from vram_conductor.broker.admission import Refusal
from vram_conductor.broker.decisions import Deny
from vram_conductor.protocol.errors import ErrorInfo


def human_bytes(count: int) -> str:
    """``1610612736`` → ``1.5 GiB``; exact where it is whole, else three or four digits."""
    raise NotImplementedError


def hint(deny: Deny) -> str:
    """One sentence that tells the operator what to do next, with numbers."""
    raise NotImplementedError


def line(deny: Deny) -> str:
    """``VRAM_LEDGER_DENY code=CAP device=… requested=… … hint="…"``: one line for people."""
    raise NotImplementedError


def error(refusal: Refusal | Deny) -> ErrorInfo:
    """The wire error: reason ``VRAM_LEDGER_DENY``, exact bytes in ``details``.

    RESOURCE_EXHAUSTED (retryable) where it could fit later; OUT_OF_RANGE where it can never
    fit, on no device, even if all else left.
    """
    raise NotImplementedError
