"""Deadlines (*pure*): one per key, re-armed and cancelled in O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

Key = tuple[str, object]
"""What is due: a word and the thing's identity, for example ``("session", peer)``."""

_SLACK = 64


class Timers:
    """A heap whose outdated entries are skipped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Key]] = []
        self._at_ns: dict[Key, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._at_ns)

    def __contains__(self, key: Key) -> bool:
        return key in self._at_ns

    def set(self, key: Key, at_ns: int) -> None:
        """Arm ``key``; an earlier setting of it is forgotten."""
        if self._at_ns.get(key) == at_ns:
            return
        self._at_ns[key] = at_ns
        self._count += 1
        heapq.heappush(self._heap, (at_ns, self._count, key))
        if len(self._heap) > 4 * len(self._at_ns) + _SLACK:
            self._compact()

    def cancel(self, key: Key) -> None:
        """Disarm ``key``. Idempotent."""
        self._at_ns.pop(key, None)

    def due(self, now_ns: int) -> Iterator[Key]:
        """Take what is due, earliest first; what is set meanwhile counts too."""
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, _, key = heapq.heappop(self._heap)
            if self._at_ns.get(key) == at_ns:
                del self._at_ns[key]
                yield key

    def next_ns(self) -> int | None:
        """The earliest deadline, None if there is none."""
        while self._heap:
            at_ns, _, key = self._heap[0]
            if self._at_ns.get(key) == at_ns:
                return at_ns
            heapq.heappop(self._heap)
        return None

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if self._at_ns.get(entry[2]) == entry[0]]
        heapq.heapify(self._heap)
