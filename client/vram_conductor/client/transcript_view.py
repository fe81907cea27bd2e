"""Draws what was said in a conversation. *Pure.*"""

from __future__ import annotations

from collections.abc import Sequence

from vram_conductor.client.text import plural
from vram_conductor.protocol.conversations import Turn

UNKNOWN = "(not known as text: only its token ids are kept)"
INDENT = "  "


def render_turns(turns: Sequence[Turn], *, forgotten: int = 0) -> str:
    """Who said what, one after the other. ``forgotten``: so many earlier turns are not kept."""
    parts: list[str] = []
    if forgotten:
        parts.append(f"({plural(forgotten, 'earlier turn')} not kept)")
    for turn in turns:
        text = UNKNOWN if turn.text is None else turn.text
        lines = "\n".join(f"{INDENT}{line}" if line else "" for line in text.split("\n"))
        parts.append(f"{_who(turn)}:\n{lines}")
    return "\n".join(parts)


def _who(turn: Turn) -> str:
    if turn.role:
        return turn.role
    return "generated" if turn.generated else "input"
