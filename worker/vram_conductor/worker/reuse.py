"""How much of a job's work has KV already, and why not more. *Pure.*"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reuse:
    """What a slot holds of the work after ``Parking.resume``.

    Attributes:
        tokens: so many of the work's first tokens have KV.
        restored: it came from the store.
        bytes: size of what was put back.
        reason: why it is less than it could be; empty if nothing was lost on the way.
    """

    tokens: int = 0
    restored: bool = False
    bytes: int = 0
    reason: str = ""
