"""A worker's session that outlives its connection (SPEC.md, "Resuming a worker's session"). *Pure.*

Both ends number what they send and keep it until the other end says that it has arrived. Over a new
connection each says how far it got, and gets the rest: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

FEATURE = "resume"
"""Among READY.features: this worker can resume its session."""

T = TypeVar("T")


class Unconfirmed(Generic[T]):
    """What was sent and may have been lost on the way, oldest first, by growing numbers."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, T]] = deque()

    def __len__(self) -> int:
        return len(self._items)

    def sent(self, number: int, item: T) -> None:
        """``item`` left under ``number``, which is larger than all before."""
        self._items.append((number, item))

    def confirm(self, number: int) -> None:
        """Everything up to ``number`` has arrived. A smaller number than before does nothing."""
        while self._items and self._items[0][0] <= number:
            self._items.popleft()

    def rest(self) -> list[T]:
        """What is not confirmed, oldest first."""
        return [item for _, item in self._items]

    def clear(self) -> None:
        """The session is over."""
        self._items.clear()
