"""Journal records that could not be written yet (*pure*), kept as few as possible.

While the disk is full the broker goes on. What it would have appended waits here; when it grows
large it is folded, so it is never much larger than the conversations themselves, which are in
memory anyway.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.broker.conversations.turns import turn_bytes
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    AgentUsed,
    BrokerEpoch,
    ConversationCommitted,
    ConversationReset,
    LeaseEnded,
    LeaseHeld,
    Record,
    WorkerEpochSeen,
)
from vram_conductor.broker.journal.restored import ID_BYTES

FOLD_BYTES = 16 * 1024 * 1024
_RECORD_BYTES = 400
"""Rough size of a record beside its token ids and turns."""


def coalesce(records: list[Record]) -> list[Record]:
    """A shorter list that has the same effect on any state these records can follow."""
    out: dict[tuple[object, ...], Record] = {}
    for record in records:
        match record:
            case BrokerEpoch():
                out[("epoch",)] = record
            case WorkerEpochSeen(device=device):
                out[("worker", device)] = record
            case AgentRegistered(agent=agent):
                out[("agent", agent)] = record
            case AgentRemoved(agent=agent):
                gone = [key for key, old in out.items() if _belongs(old, agent)]
                for key in gone:
                    del out[key]
                out[("removed", agent)] = record
            case AgentUsed(agent=agent):
                out[("used", agent)] = record
            case LeaseHeld() | LeaseEnded():
                out[("lease", record.principal, record.name)] = record
            case ConversationCommitted(conversation=key):
                out[("conversation", key)] = _merge(out.get(("conversation", key)), record)
            case ConversationReset(conversation=key):
                out[("conversation", key)] = record
    return list(out.values())


def _belongs(record: Record, agent: object) -> bool:
    match record:
        case AgentRegistered(agent=owner) | AgentRemoved(agent=owner) | AgentUsed(agent=owner):
            return owner == agent
        case ConversationCommitted(conversation=key) | ConversationReset(conversation=key):
            return key.agent_key == agent
        case _:
            return False


def _merge(earlier: Record | None, later: ConversationCommitted) -> ConversationCommitted:
    """Two commits in a row as one. A reset before it leaves nothing to keep."""
    if not isinstance(earlier, ConversationCommitted):
        return later
    same, same_turns = later.keep - earlier.keep, later.keep_turns - earlier.keep_turns
    changes: dict[str, Any] = {}
    if same > 0:
        changes |= {"keep": earlier.keep, "ids": earlier.ids[: same * ID_BYTES] + later.ids}
    if same_turns > 0:
        turns = [*earlier.turns[:same_turns], *later.turns]
        changes |= {"keep_turns": earlier.keep_turns, "turns": turns}
    return msgspec.structs.replace(later, **changes)


class Backlog:
    """Records in the order in which they must reach the file."""

    def __init__(self, fold_bytes: int = FOLD_BYTES) -> None:
        self._records: list[Record] = []
        self._bytes = 0
        self._fold_at_bytes = self._fold_bytes = fold_bytes

    def __len__(self) -> int:
        return len(self._records)

    @property
    def bytes(self) -> int:
        """About how much memory they take."""
        return self._bytes

    def add(self, record: Record) -> None:
        self._records.append(record)
        self._bytes += _size(record)
        if self._bytes > self._fold_at_bytes:
            self._records = coalesce(self._records)
            self._bytes = sum(map(_size, self._records))
            # All of it may be live: fold again only when it has doubled.
            self._fold_at_bytes = max(self._fold_bytes, 2 * self._bytes)

    def first(self) -> Record | None:
        """The record to write next."""
        return self._records[0] if self._records else None

    def drop(self, count: int) -> None:
        """The first ``count`` records are in the file."""
        self._bytes -= sum(map(_size, self._records[:count]))
        del self._records[:count]

    def records(self) -> list[Record]:
        return list(self._records)


def _size(record: Record) -> int:
    if not isinstance(record, ConversationCommitted):
        return _RECORD_BYTES
    return _RECORD_BYTES + len(record.ids) + sum(map(turn_bytes, record.turns))
