"""One piece of a job's output. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass

OVERHEAD_BYTES = 64
"""What a kept piece is charged beside its text; rounded up from what CPython takes."""

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """One TOKENS message: ``seq`` counts 0, 1, 2 … per job."""

    seq: int
    text: str
    ids: tuple[int, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """What it is charged while it is kept."""
        return OVERHEAD_BYTES + len(self.text.encode()) + ID_BYTES * len(self.ids)
