"""What the store knows of a conversation's arena without mapping it, and how it finds out."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir, arena_name
from vram_conductor.worker.store import ParkedMeta


@dataclass
class Record:
    """One conversation's arena.

    Attributes:
        bytes, spare_bytes: what the file takes, and how much of it the committed state does not.
        trusted: written or verified in this life.
    """

    meta: ParkedMeta
    bytes: int = 0
    spare_bytes: int = 0
    trusted: bool = False

    def measure(self, arena: Arena) -> None:
        self.bytes, self.spare_bytes = arena.allocated_bytes, arena.spare_bytes


def adopted(folder: ArenaDir, name: str) -> Record:
    """The record of a file that an earlier life left; what it has to spare is freed.

    Raises:
        DataLoss: ``state_corrupt``: it holds no whole state, or not the one of its name.
        Internal: ``arena_io``.
    """
    arena = Arena.open(folder.fd, name, sealed_only=True)
    try:
        meta = arena.meta
        if meta is None:
            raise fmt.corrupt("it was never finished")
        if arena_name(meta.conversation) != name:
            raise fmt.corrupt("it belongs under another name")
        arena.free_spare()
        record = Record(meta)
        record.measure(arena)
    finally:
        arena.close()
    return record
