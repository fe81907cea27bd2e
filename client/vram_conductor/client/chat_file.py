"""The files of ``/save`` and ``/load``: a conversation's turns as JSON."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import InvalidArgument

FORMAT = 1


class ChatFile(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a file.

    Attributes:
        conductor_chat: version of the format.
        turns: what was said.
    """

    conductor_chat: int
    agent: str
    conversation: str
    turns: list[Turn]


def save(path: str, agent: str, conversation: str, turns: list[Turn]) -> None:
    """Write a file that only its owner can read, whole or not at all. Raises OSError."""
    given = ChatFile(conductor_chat=FORMAT, agent=agent, conversation=conversation, turns=turns)
    target = Path(path).expanduser()
    part = target.with_name(target.name + ".part")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(given), indent=2) + b"\n")
        part.replace(target)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def load(path: str) -> list[Turn]:
    """The turns in a file.

    Raises:
        OSError: it cannot be read.
        InvalidArgument: ``bad_chat_file``: it is none, or holds turns that are not known as text.
    """
    data = Path(path).expanduser().read_bytes()
    try:
        found = msgspec.json.decode(data, type=ChatFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad(path, f"is no saved conversation: {error}") from None
    if found.conductor_chat != FORMAT:
        raise _bad(path, f"has format {found.conductor_chat}, this program reads {FORMAT}")
    for number, turn in enumerate(found.turns, 1):
        if turn.text is None:
            raise _bad(path, f"does not have the text of turn {number} of {len(found.turns)}")
    return found.turns


def _bad(path: str, what: str) -> InvalidArgument:
    return InvalidArgument("bad_chat_file", f"{path} {what}", path=path)
