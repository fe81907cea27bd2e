"""What moves took, by kind. *Pure.*

One copy rate per kind is what the planner needs to judge a move, and what STATUS shows.
"""

from __future__ import annotations

from typing import Literal

from vram_conductor.protocol.values import MoveRate

Kind = Literal[
    "wake",
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
"""``wake_*`` and ``sleep_*``: with addresses unchanged; ``wake``: the weights that wake together,
until the last of them, their pools and their KV are there; ``load``, ``open_pool``: made anew;
``state_*``: KV of one conversation between a slot and shared memory."""


_SMOOTHING = 0.3
"""Weight of a new measurement."""

_SMALL_BYTES = 1 << 20
"""Smaller moves say nothing about a rate."""

PRIOR: dict[Kind, float] = {
    "wake_weights": 40e6,
    "wake_pool": 300e6,
    "load": 1e6,
    "open_pool": 20e6,
    "state_out": 10e6,
    "state_in": 10e6,
}
"""Bytes per millisecond until one was measured: the order of magnitude of what a current GPU
does, so that the first choices are not blind."""


class Rates:
    """Sums and last values since the worker's start, and a smoothed rate of each kind. A kind
    is noted by one thread at a time."""

    def __init__(self) -> None:
        self._found: dict[Kind, MoveRate] = {}
        self._smooth: dict[Kind, float] = {}

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
        if n_bytes >= _SMALL_BYTES and ms > 0:
            known = self._smooth.get(kind, n_bytes / ms)
            self._smooth[kind] = known + _SMOOTHING * (n_bytes / ms - known)

    def expect_ms(self, kind: Kind, n_bytes: int) -> float:
        """What a move of ``n_bytes`` will probably take, in milliseconds."""
        rate = self._smooth.get(kind) or PRIOR.get(kind, 0.0)
        return n_bytes / rate if rate else 0.0

    def report(self) -> dict[str, MoveRate]:
        """For RESIDENCY."""
        return dict(self._found.items())
