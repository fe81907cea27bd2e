"""Which weights have a copy in pinned host memory, so that they can sleep. *Pure.*

Nobody is promised a backup. What the host memory of a device has left beside the promised parked
states is used for them; when a promise needs it, they go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BackupView:
    """One loaded model.

    Attributes:
        bytes: what a backup takes, or would.
        backed: there is one.
        can: one can be made now: the weights are awake and sleepable, and it was not refused.
        stays: it must not go now (the weights sleep, and somebody reads the vocabulary).
    """

    model: str
    bytes: int
    backed: bool = False
    can: bool = False
    stays: bool = False
    used_ns: int = 0


@dataclass(frozen=True)
class Backups:
    """Models whose backups go, and then those that get one."""

    drop: tuple[str, ...] = ()
    add: tuple[str, ...] = ()


def room_bytes(capacity_bytes: int, state_bytes: Sequence[int]) -> int:
    """Bytes for backups: what the states of all agents leave, each agent's largest one counted,
    and the largest of them once more, because the old one stays while a new one is written."""
    return max(0, capacity_bytes - sum(state_bytes) - max(state_bytes, default=0))


def plan_backups(room: int, models: Iterable[BackupView]) -> Backups:
    """Within ``room`` bytes: the least recently used ones go while they take more; then those
    that fit are made, the most recently used ones first. None goes for the sake of another."""
    oldest = sorted(models, key=lambda item: (item.used_ns, item.model))
    taken = sum(item.bytes for item in oldest if item.backed)
    drop: list[str] = []
    for item in oldest:
        if taken > room and item.backed and not item.stays:
            drop.append(item.model)
            taken -= item.bytes
    add: list[str] = []
    for item in reversed(oldest):
        if item.can and not item.backed and taken + item.bytes <= room:
            add.append(item.model)
            taken += item.bytes
    return Backups(tuple(drop), tuple(add))
