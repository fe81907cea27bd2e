"""What moves took, by kind. *Pure.*

One copy rate per kind is what the planner needs to judge a move, and what STATUS shows.
"""

from __future__ import annotations

from typing import Literal

from vram_conductor.protocol.values import MoveRate

Kind = Literal[
    "wake_weights",
    "sleep_weights",
    "wake_pool",
    "sleep_pool",
    "back_up",
    "load",
    "open_pool",
    "state_out",
    "state_in",
]
"""``wake_*`` and ``sleep_*``: with addresses unchanged; ``load``, ``open_pool``: made anew;
``state_*``: KV of one conversation between a slot and shared memory."""


class Rates:
    """Sums and last values since the worker's start."""

    def __init__(self) -> None:
        self._found: dict[Kind, MoveRate] = {}

    def note(self, kind: Kind, n_bytes: int, ms: float) -> None:
        """One move of ``n_bytes`` took ``ms``."""
        before = self._found.get(kind, MoveRate())
        self._found[kind] = MoveRate(
            count=before.count + 1,
            bytes=before.bytes + n_bytes,
            ms=before.ms + ms,
            last_bytes=n_bytes,
            last_ms=ms,
        )

    def bytes_per_ms(self, kind: Kind) -> float | None:
        """Mean rate of a kind; None before the first move that took any time."""
        found = self._found.get(kind)
        return found.bytes / found.ms if found and found.ms > 0 else None

    def report(self) -> dict[str, MoveRate]:
        """For RESIDENCY."""
        return dict(self._found.items())
