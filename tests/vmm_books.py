"""A stand-in for the preload library that only keeps the books: what sleeps keeps its memory."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.worker.vmm.library import TagStat


class Books:
    """See ``Vmm``. ``full``: the next wake finds no memory. ``broken``: so do copies."""

    def __init__(self, allocations: int = 1) -> None:
        self.allocations = allocations
        self.asleep: dict[int, bool] = {}
        self.backups: set[int] = set()
        self.inside: list[int] = []
        self.now = 0
        self.full = self.broken = False

    def new_tag(self) -> int:
        self.asleep[len(self.asleep) + 1] = False
        return len(self.asleep)

    @contextmanager
    def region(self, tag: int) -> Generator[None]:
        self.inside.append(tag)
        self.now = tag
        yield
        self.now = 0

    @contextmanager
    def gathered(self) -> Generator[None]:
        yield
        if self.broken:
            raise Internal("driver_error", "copying failed")

    def stat(self, tag: int) -> TagStat:
        backup = 77 if tag in self.backups else 0
        return TagStat(100, 0 if self.asleep[tag] else 100, backup, self.allocations)

    def back_up(self, tag: int) -> None:
        assert not self.asleep[tag]
        self.backups.add(tag)

    def drop_backup(self, tag: int) -> None:
        self.backups.discard(tag)

    def sleep(self, tag: int, keep: bool) -> None:
        assert not self.asleep[tag]
        assert not keep or tag in self.backups
        self.asleep[tag] = True

    def wake(self, tag: int) -> None:
        if self.full:
            raise ResourceExhausted("wake_failed", "no memory", retryable=True)
        self.asleep[tag] = False
