"""Parked states in plain memory, for tests of the worker's core; it outlives a worker."""

from __future__ import annotations

from vram_conductor.protocol.errors import DataLoss, ResourceExhausted
from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.store import ParkedMeta


class MemoryStore:
    """See ``store.Store``. ``corrupt`` names the conversations whose next read fails."""

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.states: dict[ConversationKey, tuple[ParkedMeta, bytes]] = {}
        self.corrupt: set[ConversationKey] = set()
        self.commits = 0
        self.lent_bytes = self.beside_bytes = 0
        self._writing: dict[ConversationKey, bytearray] = {}

    @property
    def used_bytes(self) -> int:
        return sum(len(blob) for _, blob in self.states.values())

    def lend(self, size_bytes: int) -> bool:
        if self.used_bytes + self.lent_bytes + size_bytes > self.capacity_bytes:
            return False
        self.lent_bytes += size_bytes
        return True

    def take_back(self, size_bytes: int) -> None:
        assert 0 <= size_bytes <= self.lent_bytes
        self.lent_bytes -= size_bytes

    def writer(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        assert 0 < need_bytes <= max_bytes
        # As with two halves: the committed state stays while the next one is written.
        limit = self.capacity_bytes - self.lent_bytes
        if self.used_bytes + need_bytes > limit:
            raise ResourceExhausted(
                "arena_full",
                "the store is full",
                need_bytes=need_bytes,
                used_bytes=self.used_bytes,
                capacity_bytes=limit,
            )
        self._writing[key] = bytearray(need_bytes)
        return memoryview(self._writing[key])

    def commit(self, meta: ParkedMeta) -> None:
        data = bytes(self._writing.pop(meta.conversation)[: meta.payload_bytes])
        self.states.pop(meta.conversation, None)
        self.states[meta.conversation] = (meta, data)
        self.commits += 1

    def meta(self, key: ConversationKey) -> ParkedMeta | None:
        found = self.states.get(key)
        return found[0] if found else None

    def read(self, key: ConversationKey) -> tuple[ParkedMeta, memoryview] | None:
        if key in self.corrupt:
            self.corrupt.discard(key)
            self.delete(key)
            raise DataLoss("state_corrupt", "checksum")
        if key not in self.states:
            return None
        meta, blob = self.states[key]
        # The most recently used one is the last; without a moment in which it is not there.
        self.states = {**{k: v for k, v in self.states.items() if k != key}, key: (meta, blob)}
        return meta, memoryview(blob)

    def delete(self, key: ConversationKey) -> None:
        self.states.pop(key, None)

    def keys(self) -> list[ConversationKey]:
        return list(self.states)

    def pinned(self, key: ConversationKey) -> bool:
        return False

    def bytes(self, key: ConversationKey) -> int:
        found = self.states.get(key)
        return len(found[1]) if found else 0
