"""Host memory for backups: what lies beside the store, then what the store lends. *Pure.*"""

from __future__ import annotations

from vram_conductor.worker.store import Store


class HostRoom:
    """Keeps count of what backups take.

    Attributes:
        taken_bytes: so much.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.taken_bytes = 0

    @property
    def capacity_bytes(self) -> int:
        """All host memory of this device: for parked states and for backups."""
        return self._store.capacity_bytes + self._store.beside_bytes

    def take(self, size_bytes: int) -> bool:
        """``size_bytes`` more; False, with nothing changed, where the store has none to spare."""
        more = self._from_store(self.taken_bytes + size_bytes) - self._from_store(self.taken_bytes)
        if more and not self._store.lend(more):
            return False
        self.taken_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """``size_bytes`` less."""
        assert 0 <= size_bytes <= self.taken_bytes
        left = self.taken_bytes - size_bytes
        less = self._from_store(self.taken_bytes) - self._from_store(left)
        if less:
            self._store.take_back(less)
        self.taken_bytes = left

    def _from_store(self, taken_bytes: int) -> int:
        return max(0, taken_bytes - self._store.beside_bytes)
