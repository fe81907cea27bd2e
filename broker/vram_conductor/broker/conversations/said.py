"""What a job adds to the turns of its conversation (*pure*)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vram_conductor.broker.conversations.turns import Turns, bounded
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.messages import Decode

ANSWERS = "assistant"
"""The role of what is generated in a chat."""


def said(
    turns: Turns, request: Decode, answer: str, *, keep: int, prompt_end: int, end: int
) -> tuple[int, list[Turn]]:
    """How many turns stay, and what follows them.

    Args:
        turns: before the job.
        request: its input.
        answer: the text that was generated.
        keep: tokens of the transcript that stay.
        prompt_end, end: length of the transcript after the prompt, and after the answer.
    """
    asked = _input(request)
    if asked:
        asked[-1] = msgspec.structs.replace(asked[-1], end=prompt_end)
    role = "" if request.messages is None else ANSWERS
    reply = Turn(role=role, text=answer, generated=True, end=end)
    if request.continue_:
        return turns.total, [*asked, reply]
    same = _common(turns, asked, keep)
    return same, [*asked[same:], reply]


def _input(request: Decode) -> list[Turn]:
    if request.messages is not None:
        return [Turn(role=item.role, text=item.content) for item in request.messages]
    return [Turn(text=request.prompt)]


def _common(turns: Turns, asked: Sequence[Turn], keep: int) -> int:
    """How many turns a whole conversation begins with that are known: of the same words, and within
    the tokens that stay. All or nothing where older ones have been forgotten."""
    if turns.first:
        return 0
    count = 0
    for known, new in zip(turns.view(), asked, strict=False):
        same = (known.role, known.text) == (new.role, bounded(new).text)
        if not same or known.text is None or (known.end is not None and known.end > keep):
            break
        count += 1
    return count
