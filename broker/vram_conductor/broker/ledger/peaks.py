"""The largest of many named sizes, kept up to date. Pure."""

from __future__ import annotations

from collections.abc import Collection

from vram_conductor.broker.ledger.multiset import Multiset


class Peaks:
    """Sizes by name. Any change is O(log n); the largest is at hand, also without some names."""

    __slots__ = ("_by_name", "_order")

    def __init__(self) -> None:
        self._by_name: dict[str, int] = {}
        self._order: Multiset[tuple[int, str]] = Multiset()

    def put(self, name: str, size: int) -> None:
        """Set a size."""
        old = self._by_name.get(name)
        if old == size:
            return
        if old is not None:
            self._order.remove((old, name))
        self._by_name[name] = size
        self._order.add((size, name))

    def drop(self, name: str) -> None:
        """Remove a size, if it is there."""
        old = self._by_name.pop(name, None)
        if old is not None:
            self._order.remove((old, name))

    @property
    def top(self) -> int:
        """The largest size; 0 if there is none."""
        return self._order.top[0] if self._by_name else 0

    def top_without(self, names: Collection[str]) -> int:
        """The largest size of all other names; 0 if there is none. O(len(names))."""
        for size, name in reversed(self._order.largest(len(names) + 1)):
            if name not in names:
                return size
        return 0
