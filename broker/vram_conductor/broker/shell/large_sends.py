"""Large messages that libzmq has and the kernel has not taken yet (*pure*).

libzmq bounds what it queues for a peer by the number of messages, whatever their size. So large
ones are given to it a few at a time; the others wait in the outbox, where bytes count.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

LARGE_BYTES = 64 * 1024
"""Frames of this size or more are counted; pyzmq sends them without a copy, and so can tell when
libzmq has let go of them. A thousand smaller ones are bounded by their number."""

IN_FLIGHT_BYTES_MAX = 8 * 1024 * 1024
"""Of one peer; one message alone may be larger."""


class Tracker(Protocol):
    """What pyzmq gives for a frame that is sent without a copy."""

    @property
    def done(self) -> bool: ...


class LargeSends:
    """What each peer has in flight."""

    def __init__(self) -> None:
        self._peers: dict[bytes, deque[tuple[Tracker, int]]] = {}

    def room(self, peer: bytes, size_bytes: int) -> bool:
        """Whether a frame of this size may be given to libzmq now."""
        sends = self._peers.get(peer)
        if sends is None:
            return True
        while sends and sends[0][0].done:
            sends.popleft()
        if not sends:
            del self._peers[peer]
            return True
        return size_bytes + sum(size for _, size in sends) <= IN_FLIGHT_BYTES_MAX

    def sent(self, peer: bytes, size_bytes: int, tracker: Tracker) -> None:
        """It was given to libzmq."""
        self._peers.setdefault(peer, deque()).append((tracker, size_bytes))

    def forget(self, peer: bytes) -> None:
        """The peer is gone. Idempotent."""
        self._peers.pop(peer, None)
