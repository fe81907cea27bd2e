"""Journal bytes → state (*pure*): folds intact records and says what was not usable."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from vram_conductor.broker.journal.format import (
    FRAME_BYTES,
    HEADER_BYTES,
    Data,
    Hole,
    Payload,
    Torn,
    scan,
)
from vram_conductor.broker.journal.records import (
    ConversationCommitted,
    ConversationReset,
    Record,
)
from vram_conductor.broker.journal.restored import ID_BYTES, Restored, RestoredConversation
from vram_conductor.protocol.values import ConversationKey

_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Replay:
    """A folded journal.

    Attributes:
        restored: the state.
        good_bytes: length of the file up to the torn tail; all of it if nothing is torn.
        records: intact records, unreadable ones included.
        holes: damaged spans with intact records behind them, as (start, end).
        unreadable: intact records of a kind that this version does not know.
        lost: conversations emptied because a part of their transcript is missing.
    """

    restored: Restored = field(default_factory=Restored)
    good_bytes: int = HEADER_BYTES
    records: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    unreadable: int = 0
    lost: set[ConversationKey] = field(default_factory=set)


def replay(data: Data, start: int = HEADER_BYTES) -> Replay:
    """Fold everything behind the header."""
    result = Replay(good_bytes=len(data))
    for item in scan(data, start):
        match item:
            case Payload(start=first, end=end):
                _fold(result, data[first:end])
            case Hole(start=first, end=end):
                result.holes.append((first, end))
            case Torn(start=first):
                result.good_bytes = first
    return result


def encode(record: Record) -> bytes:
    """Payload of a record."""
    return _encoder.encode(record)


def compact_bytes(restored: Restored) -> int:
    """About how long the shortest journal with this state is."""
    states = restored.conversations.values()
    transcripts = sum(len(state.transcript) for state in states)
    small = len(restored.agents) * 400 + len(states) * 100
    return HEADER_BYTES + FRAME_BYTES + transcripts + small


def _fold(result: Replay, payload: bytes) -> None:
    result.records += 1
    try:
        record = _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        result.unreadable += 1
        return
    if isinstance(record, ConversationCommitted):
        record = _without_gap(result, record)
    result.restored.apply(record)


def _without_gap(
    result: Replay, record: ConversationCommitted
) -> ConversationCommitted | ConversationReset:
    """The record, or a reset where it continues a transcript that we do not have.

    A transcript with a gap would be wrong without anybody noticing. Versions count commits, so
    behind damage a missing commit shows even where the lengths happen to fit.
    """
    key = record.conversation
    known = result.restored.conversations.get(key, RestoredConversation())
    too_short = record.keep * ID_BYTES > len(known.transcript)
    skipped = bool(result.holes) and record.version != known.version + 1
    if record.keep == 0 or not (too_short or skipped):
        if record.keep == 0:
            result.lost.discard(key)
        return record
    result.lost.add(key)
    return ConversationReset(conversation=key, version=record.version)
