"""A store that the engine thread and the hauler share: one call at a time.

``Parking`` holds the lock across the calls that belong together (a writer's view and its commit, a
reader's view and what it is read for), so that nobody takes a state away that is being copied.
"""

from __future__ import annotations

import threading

from vram_conductor.protocol.values import ConversationKey
from vram_conductor.worker.store import ParkedMeta, Store


class SharedStore:
    """See :class:`vram_conductor.worker.store.Store`.

    Attributes:
        lock: reentrant; hold it while a view is in use.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.lock = threading.RLock()

    @property
    def capacity_bytes(self) -> int:
        return self._store.capacity_bytes

    @property
    def used_bytes(self) -> int:
        with self.lock:
            return self._store.used_bytes

    @property
    def lent_bytes(self) -> int:
        return self._store.lent_bytes

    @property
    def beside_bytes(self) -> int:
        return self._store.beside_bytes

    def lend(self, size_bytes: int) -> bool:
        with self.lock:
            return self._store.lend(size_bytes)

    def take_back(self, size_bytes: int) -> None:
        with self.lock:
            self._store.take_back(size_bytes)

    def writer(self, key: ConversationKey, need_bytes: int, max_bytes: int) -> memoryview:
        with self.lock:
            return self._store.writer(key, need_bytes, max_bytes)

    def commit(self, meta: ParkedMeta) -> None:
        with self.lock:
            self._store.commit(meta)

    def meta(self, key: ConversationKey) -> ParkedMeta | None:
        # No lock: one look-up, of a conversation that nobody else touches now.
        return self._store.meta(key)

    def read(self, key: ConversationKey) -> tuple[ParkedMeta, memoryview] | None:
        with self.lock:
            return self._store.read(key)

    def delete(self, key: ConversationKey) -> None:
        with self.lock:
            self._store.delete(key)

    def keys(self) -> list[ConversationKey]:
        with self.lock:
            return self._store.keys()

    def pinned(self, key: ConversationKey) -> bool:
        return self._store.pinned(key)

    def bytes(self, key: ConversationKey) -> int:
        return self._store.bytes(key)
