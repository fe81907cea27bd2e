"""Copies of conversations, and what was said in them: FORK and HISTORY, and their answers. *Pure.*

DECODE is what makes a conversation and goes on with it, RESET forgets it: see ``messages``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol.base import Base
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION


class Fork(Base, frozen=True, kw_only=True, tag="FORK"):
    """Begin a conversation as a copy of another of the same agent. Afterwards they share nothing.

    Attributes:
        conversation: the original, as it stood after its last job that is over.
        to: the new one's name.
        expect_version: ABORTED unless the original has this version.
    """

    rid: bytes
    agent: str
    conversation: str = DEFAULT_CONVERSATION
    to: str
    expect_version: int | None = None


class History(Base, frozen=True, kw_only=True, tag="HISTORY"):
    """Ask for a page of a conversation's record.

    Attributes:
        from_turn: the first turn wanted.
        from_token: the first token id wanted; None: no ids.
        expect_version: ABORTED unless the conversation has this version, so that pages fit
            together.
    """

    rid: bytes
    agent: str
    conversation: str = DEFAULT_CONVERSATION
    from_turn: int = 0
    from_token: int | None = None
    expect_version: int | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was said in a conversation.

    Attributes:
        role: of a chat message: ``user``, ``system``, ``assistant`` …; empty: raw input, and what
            followed it.
        text: None: not known as text (it was sent as token ids), or too long to be kept.
        generated: the model said it, in this conversation or in what it is a copy of.
        end: length of the transcript up to its end, in tokens; None: not known.
    """

    role: str = ""
    text: str | None = None
    generated: bool = False
    end: int | None = None


class HistoryPage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to HISTORY.

    Attributes:
        version, tokens: of the conversation; its length in tokens.
        turns_total: how many turns there were.
        first_turn: number of the first one in ``turns``; larger than was asked for where earlier
            ones are not kept any more.
        next_turn: where the next page begins; None: this was the last turn.
        ids: token ids from ``from_token`` on; ``next_token``: likewise.
    """

    conversation: str
    version: int
    tokens: int
    turns_total: int = 0
    first_turn: int = 0
    turns: list[Turn] = []
    next_turn: int | None = None
    ids: list[int] = []
    next_token: int | None = None


class ForkReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer to FORK.

    Attributes:
        conversation: the new one.
        version, tokens: of the new one; its length in tokens.
        source_version: the version of the original that it is a copy of.
        kv: ``copied``: the next job restores it. ``absent``: its prompt is computed again.
        kv_tokens, kv_bytes: what was copied.
        reason: why nothing was.
    """

    conversation: str
    version: int
    tokens: int
    source_version: int
    kv: Literal["copied", "absent"] = "absent"
    kv_tokens: int = 0
    kv_bytes: int = 0
    reason: str = ""
