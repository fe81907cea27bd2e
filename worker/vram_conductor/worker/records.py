"""What the store knows of a conversation's arena without mapping it, and how it finds out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir, arena_name
from vram_conductor.worker.store import ParkedMeta

log = logging.getLogger(__name__)


@dataclass
class Record:
    """One conversation's arena.

    Attributes:
        bytes, spare_bytes: what the file takes, and how much of it the committed state does not.
        trusted: written or verified in this life.
        reads: how often this state was read.
    """

    meta: ParkedMeta
    bytes: int = 0
    spare_bytes: int = 0
    trusted: bool = False
    reads: int = 0

    def read_again(self) -> bool:
        """Note a read; whether it was not the first."""
        self.reads += 1
        return self.reads > 1

    def measure(self, arena: Arena) -> None:
        self.bytes, self.spare_bytes = arena.allocated_bytes, arena.spare_bytes


def adopt_all(folder: ArenaDir) -> OrderedDict[ConversationKey, Record]:
    """The records of what an earlier life left in ``folder``, the least recently written first;
    files that hold no whole state are deleted."""
    records: OrderedDict[ConversationKey, Record] = OrderedDict()
    for name in folder.names():
        if name.endswith(".new"):
            folder.remove(name)
            continue
        try:
            record = _adopted(folder, name)
        except ConductorError as error:
            log.warning("parked state %s discarded: %s", name, error.info.message)
            folder.remove(name)
        else:
            records[record.meta.conversation] = record
    return records


def _adopted(folder: ArenaDir, name: str) -> Record:
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
