"""What was said in a conversation, for people (*pure*). The record is the transcript; this is kept
beside it, follows it, and is bounded: the oldest turns go first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.conversations import Turn

TURN_EXTRA_BYTES = 64
"""What a turn counts beside its text."""


def turn_bytes(turn: Turn) -> int:
    """What a turn counts: its text in UTF-8, and a bit."""
    return TURN_EXTRA_BYTES + len((turn.text or "").encode())


@dataclass(slots=True)
class Turns:
    """The turns of one conversation, numbered from 0.

    Attributes:
        first: the number of the oldest that is kept.
    """

    first: int = 0
    _kept: list[Turn] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many there were."""
        return self.first + len(self._kept)

    def view(self) -> list[Turn]:
        """Those that are kept, in order."""
        return list(self._kept)

    def commit(self, keep: int, more: Sequence[Turn]) -> None:
        """Become the first ``keep`` turns and ``more``. Where there are fewer than ``keep``, those
        between have been forgotten."""
        if keep <= self.first or keep > self.total:
            self.first, self._kept = keep, []
        else:
            del self._kept[keep - self.first :]
        self._kept += map(bounded, more)
        size_bytes, gone = sum(map(turn_bytes, self._kept)), 0
        while size_bytes > limits.HISTORY_BYTES_MAX:
            size_bytes -= turn_bytes(self._kept[gone])
            gone += 1
        del self._kept[:gone]
        self.first += gone

    def copy(self) -> Turns:
        """One of its own."""
        return Turns(self.first, list(self._kept))

    def page(self, start: int) -> tuple[int, list[Turn], int | None]:
        """The turns from number ``start`` on, as many as fit into one answer: the number of the
        first one, the turns, and where the next page begins."""
        first = min(max(start, self.first), self.total)
        taken: list[Turn] = []
        left_bytes = limits.HISTORY_PAGE_BYTES_MAX
        for turn in self._kept[first - self.first :]:
            left_bytes -= turn_bytes(turn)
            if taken and left_bytes < 0:
                break
            taken.append(turn)
        following = first + len(taken)
        return first, taken, following if following < self.total else None


def bounded(turn: Turn) -> Turn:
    """Without its text, where that is too long to be kept."""
    if turn.text is None or len(turn.text.encode()) <= limits.TURN_BYTES_MAX:
        return turn
    return msgspec.structs.replace(turn, text=None)
