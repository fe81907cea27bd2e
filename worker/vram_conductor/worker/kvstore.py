"""Parked states in shared memory: the Store (``store.py``) over arenas.

Files describe themselves: at start every arena is adopted or deleted. A cap bounds what all of
them take; when it is reached, the spare halves of other arenas go first, then ``writer`` refuses
with numbers and nothing is lost. (Spilling to disk would be the next step, in ``_make_room``.)
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from vram_conductor.protocol.errors import ConductorError, DataLoss, ResourceExhausted
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.arena import Arena
from vram_conductor.worker.arena_dir import ArenaDir, arena_name, new_name
from vram_conductor.worker.pinning import Pinning, with_reserve
from vram_conductor.worker.records import Record, adopt_all
from vram_conductor.worker.sealer import Sealer
from vram_conductor.worker.store import ParkedMeta

log = logging.getLogger(__name__)
T = TypeVar("T")

MAPPED_MAX = 128
"""Arenas mapped at once; the others keep their file and are mapped again on use."""

PIN_FROM_SEQ = 2
"""The first state of a conversation may be the only one; one that is read twice comes back, too."""


class KVStore:
    """See :class:`vram_conductor.worker.store.Store`. One call at a time."""

    def __init__(
        self,
        folder: ArenaDir,
        cap_bytes: int,
        mapped_max: int = MAPPED_MAX,
        pinning: Pinning | None = None,
    ) -> None:
        """Adopt what ``folder`` holds."""
        self.pinning = pinning or Pinning()
        self._folder = folder
        self._cap_bytes = cap_bytes
        self.lent_bytes = self.beside_bytes = 0
        self._mapped_max = mapped_max
        self._records = adopt_all(folder)
        self._mapped: OrderedDict[ConversationKey, Arena] = OrderedDict()
        self._fresh: dict[ConversationKey, Arena] = {}
        """Arenas that have no commit yet: first ones, and those that replace outgrown ones."""
        self._writing: set[ConversationKey] = set()
        self._sealer = Sealer()
        while self._records and self.used_bytes > self._cap_bytes:
            key = next(iter(self._records))
            log.warning("parked state of %s discarded: host_cap has become smaller", key)
            self.delete(key)

    # --- the Store protocol -------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self._cap_bytes

    @property
    def used_bytes(self) -> int:
        fresh = sum(arena.allocated_bytes for arena in self._fresh.values())
        return fresh + sum(record.bytes for record in self._records.values())

    def lend(self, size_bytes: int) -> bool:
        used = self.used_bytes
        short = used + self.lent_bytes + size_bytes - self._cap_bytes
        if short > 0 and (short > self.spare_bytes or self._free_spares(short) < short):
            return False
        self.lent_bytes += size_bytes
        return True

    def take_back(self, size_bytes: int) -> None:
        assert 0 <= size_bytes <= self.lent_bytes
        self.lent_bytes -= size_bytes

    def writer(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        self._discard(key)
        try:
            arena = self._arena(key)
        except DataLoss:
            arena = None
        if arena is None or not arena.fits(need_bytes):
            return self._write_fresh(key, need_bytes, max_bytes)
        self._writing.add(key)
        try:
            self._make_room(arena.growth_bytes(need_bytes))
            return self._insist(lambda: arena.begin(need_bytes))
        except ConductorError:
            self._discard(key)
            raise
        finally:
            self._records[key].measure(arena)

    def _write_fresh(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        half_bytes = fmt.half_bytes_for(max(need_bytes, max_bytes))
        first = min(half_bytes, fmt.round_up(need_bytes, fmt.GROW_BYTES))
        self._make_room(fmt.HEADER_BYTES + first)
        name = new_name(arena_name(key))
        # A leftover can only be of our own making: the folder is private and locked.
        self._folder.remove(name)
        arena = self._insist(lambda: Arena.create(self._folder.fd, name, half_bytes, self.pinning))
        self._fresh[key] = arena
        try:
            return self._insist(lambda: arena.begin(need_bytes))
        except ConductorError:
            self._discard(key)
            raise

    def _insist(self, attempt: Callable[[], T]) -> T:
        """Where the file system is full, try again without what was deleted or is spare."""
        try:
            return attempt()
        except ResourceExhausted:
            self._sealer.settle()
            self._free_spares(self._cap_bytes)
            return attempt()

    def commit(self, meta: ParkedMeta) -> None:
        key = meta.conversation
        arena = self._fresh.get(key)
        if arena is None:
            assert key in self._writing
            arena = self._mapped[key]
            arena.commit(meta)
        else:
            arena.commit(meta)
            # The rename is the commit: a crash before it leaves the old file.
            self._folder.rename(new_name(arena_name(key)), arena_name(key))
            del self._fresh[key]
            self._unmap(key)
        self._writing.discard(key)
        self._records[key] = record = Record(meta, trusted=True)
        record.measure(arena)
        # Pinning is worth it for what comes back again and again.
        if pin := self.pinning.active and arena.seq >= PIN_FROM_SEQ:
            self._reserve(arena, record)
        self._sealer.submit(arena, pin=pin)
        self._map(key, arena)

    def meta(self, key: ConversationKey) -> ParkedMeta | None:
        record = self._records.get(key)
        return record.meta if record else None

    def read(self, key: ConversationKey) -> tuple[ParkedMeta, memoryview] | None:
        self._discard(key)
        arena = self._arena(key)
        if arena is None:
            return None
        record = self._records[key]
        try:
            if not record.trusted:
                arena.verify()
                record.trusted = True
            if record.read_again() and self.pinning.active and not arena.pinned:
                self._sealer.pin(arena)
            return record.meta, arena.payload()
        except DataLoss:
            self.delete(key)
            raise

    def delete(self, key: ConversationKey) -> None:
        self._discard(key)
        self._unmap(key)
        if self._records.pop(key, None) is not None:
            self._folder.remove(arena_name(key))

    def keys(self) -> list[ConversationKey]:
        return list(self._records)

    def pinned(self, key: ConversationKey) -> bool:
        arena = self._mapped.get(key)
        return arena is not None and arena.pinned

    def bytes(self, key: ConversationKey) -> int:
        record = self._records.get(key)
        return record.bytes - record.spare_bytes if record else 0

    # --- beyond the protocol ------------------------------------------------------------------

    @property
    def spare_bytes(self) -> int:
        """What :attr:`used_bytes` holds beyond the sum of :meth:`bytes`: halves that are being
        written, or will be the next time; they are given back as soon as room is needed."""
        return self.used_bytes - sum(self.bytes(key) for key in self._records)

    def close(self) -> None:
        """Seal what is committed, unmap, release the folder. The files stay."""
        self._sealer.close()
        for key in list(self._fresh):
            self._discard(key)
        for key in list(self._mapped):
            self._unmap(key)
        self._folder.close()

    # --- inside -------------------------------------------------------------------------------

    def _arena(self, key: ConversationKey) -> Arena | None:
        """The arena of ``key``, mapped and marked as used; None if it has none.

        Raises:
            DataLoss: ``state_corrupt``: the state has been deleted.
        """
        record = self._records.get(key)
        if record is None:
            return None
        arena = self._mapped.get(key)
        if arena is None:
            try:
                name = arena_name(key)
                arena = Arena.open(
                    self._folder.fd, name, sealed_only=not record.trusted, pinning=self.pinning
                )
                if arena.meta != record.meta:
                    arena.close()
                    raise fmt.corrupt("it has been replaced")
            except DataLoss:
                self.delete(key)
                raise
        self._map(key, arena)
        return arena

    def _map(self, key: ConversationKey, arena: Arena) -> None:
        """Note that ``arena`` is in use now; unmap the least recently used one beyond the bound."""
        self._records.move_to_end(key)
        self._mapped[key] = arena
        self._mapped.move_to_end(key)
        idle = (other for other in self._mapped if other != key and other not in self._writing)
        if len(self._mapped) > self._mapped_max and (victim := next(idle, None)) is not None:
            # What is not mapped has no spare half, so that room can be made without mapping it.
            self._free_spare(victim)
            self._unmap(victim)

    def _unmap(self, key: ConversationKey) -> None:
        arena = self._mapped.pop(key, None)
        if arena is not None:
            arena.close()

    def _discard(self, key: ConversationKey) -> None:
        """Drop what was written and not committed."""
        self._writing.discard(key)
        arena = self._fresh.pop(key, None)
        if arena is not None:
            arena.close()
            self._folder.remove(new_name(arena_name(key)))

    def _reserve(self, arena: Arena, record: Record) -> None:
        """Let a conversation's next, longer states find pinned memory, while half of the room is
        free: it would soon have to be given back otherwise."""
        least, wanted = with_reserve(record.meta.payload_bytes)
        wanted = fmt.round_up(wanted, fmt.GROW_BYTES)
        used_bytes = self.used_bytes + 2 * wanted - record.bytes
        if used_bytes <= (self._cap_bytes - self.lent_bytes) // 2:
            arena.reserve(least, wanted)
            record.measure(arena)

    def _make_room(self, grow_bytes: int) -> None:
        """Check that ``grow_bytes`` more stay under the cap; free spare halves if they do not.

        Raises:
            ResourceExhausted: ``arena_full``.
        """
        limit = self._cap_bytes - self.lent_bytes
        short = self.used_bytes + grow_bytes - limit
        if short <= 0 or self._free_spares(short) >= short:
            return
        raise ResourceExhausted(
            "arena_full",
            f"parking needs {grow_bytes} more bytes, {limit - self.used_bytes} of {limit} are "
            "free; raise host_cap, or unregister agents",
            need_bytes=grow_bytes,
            used_bytes=self.used_bytes,
            capacity_bytes=limit,
        )

    def _free_spares(self, enough_bytes: int) -> int:
        """Free what is spare, least recently used first, until ``enough_bytes`` are free."""
        freed = 0
        for key in self._mapped:
            if freed < enough_bytes:
                freed += self._free_spare(key)
        return freed

    def _free_spare(self, key: ConversationKey) -> int:
        arena = self._mapped[key]
        if arena.held:
            self._sealer.settle()
        freed = arena.free_spare(writing=key in self._writing)
        self._records[key].measure(arena)
        if freed and self.pinning.active:
            self._sealer.pin(arena)
        return freed
