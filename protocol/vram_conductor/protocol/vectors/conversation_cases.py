"""Valid messages about copies of conversations and their history, of clients and workers.
*Pure.*"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Copied, Copy
from vram_conductor.protocol.conversations import (
    Fork,
    ForkReceipt,
    History,
    HistoryPage,
    Turn,
)
from vram_conductor.protocol.messages import Ok, Reset
from vram_conductor.protocol.values import ConversationKey

RECEIPT = ForkReceipt(
    conversation="side",
    version=1,
    tokens=42,
    source_version=7,
    kv="copied",
    kv_tokens=42,
    kv_bytes=1_000_000,
)
PAGE = HistoryPage(
    conversation="main",
    version=7,
    tokens=42,
    turns_total=3,
    first_turn=1,
    turns=[
        Turn(role="user", text="Grüße 🚢", end=30),
        Turn(role="assistant", text="", generated=True, end=42),
        Turn(),
    ],
    ids=[0, limits.TOKEN_ID_MAX],
    next_token=2,
)


def requests(rid: bytes) -> dict[str, msgspec.Struct]:
    """What a client asks."""
    return {
        "reset": Reset(rid=rid, agent="coder"),
        "reset_full": Reset(rid=rid, agent="coder", conversation="side"),
        "reset_forget": Reset(rid=rid, agent="coder", conversation="side", forget=True),
        "fork": Fork(rid=rid, agent="coder", to="side"),
        "fork_full": Fork(
            rid=rid, agent="coder", conversation="side", to="other.1", expect_version=7
        ),
        "history": History(rid=rid, agent="coder"),
        "history_full": History(
            rid=rid,
            agent="coder",
            conversation="side",
            from_turn=12,
            from_token=65_536,
            expect_version=7,
        ),
    }


def answers(rid: bytes) -> dict[str, msgspec.Struct]:
    """What it is told."""
    return {
        "ok_fork": Ok(rid=rid, body=msgspec.to_builtins(RECEIPT)),
        "ok_history": Ok(rid=rid, body=msgspec.to_builtins(PAGE)),
    }


def commands(epoch: int) -> dict[str, tuple[msgspec.Struct, list[bytes]]]:
    """What the broker tells a worker."""
    source, target = (ConversationKey("local", "coder", name) for name in ("main", "side"))
    return {"copy": (Copy(broker_epoch=epoch, op=14, source=source, target=target), [])}


def replies(echo: dict[str, Any]) -> dict[str, tuple[msgspec.Struct, list[bytes]]]:
    """What the worker answers."""
    return {
        "copied": (Copied(**echo, n_tokens=42, state_bytes=1_000_000), []),
        "copied_nothing": (Copied(**echo, reason="state_missing"), []),
    }
