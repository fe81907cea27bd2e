"""Typed structs from the broker's answers (*pure*)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from vram_conductor.protocol.conversations import ForkReceipt, HistoryPage
from vram_conductor.protocol.drain import DrainReceipt
from vram_conductor.protocol.errors import Internal
from vram_conductor.protocol.fitting import FitReport
from vram_conductor.protocol.status import AgentList, AgentStatus, LeaseStatus, StatusReport

T = TypeVar(
    "T",
    AgentStatus,
    AgentList,
    LeaseStatus,
    StatusReport,
    ForkReceipt,
    HistoryPage,
    DrainReceipt,
    FitReport,
)


def typed(body: dict[str, Any], kind: type[T]) -> T:
    """``OK.body`` as a struct; unknown fields are ignored.

    Raises:
        Internal: ``bad_answer``: the broker and this client do not fit together.
    """
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise Internal(
            "bad_answer",
            f"the broker's answer is no {kind.__name__} ({error}); use the same version of "
            "vram-conductor on both sides",
        ) from None


def typed_agent(body: dict[str, Any]) -> AgentStatus | None:
    """The answer to REGISTER; None from a broker that says no more than OK."""
    return typed(body, AgentStatus) if body else None
