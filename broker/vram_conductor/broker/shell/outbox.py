"""Messages that a socket did not take yet (*pure*): small, bounded, in order, per peer.

ZeroMQ queues a thousand small messages per peer, or a few large ones; what is further behind than
that waits here. A peer that does not catch up is dropped rather than remembered for ever: its
streams are kept by the core, and it can RESUME them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

PEER_BYTES_MAX = 24 * 1024 * 1024
"""Room for some of the largest answers. Streams need little of it: a client that is behind gets no
more of them until it has caught up."""

TOTAL_BYTES_MAX = 256 * 1024 * 1024
STALL_NS = 30_000_000_000
"""A peer that takes nothing for this long is dropped."""

MESSAGE_BYTES = 200
"""What a waiting message costs beside its content, roughly."""


@dataclass(slots=True)
class Waiting:
    """One peer's messages, oldest first, as frames without the routing id."""

    since_ns: int
    messages: deque[list[bytes]] = field(default_factory=deque)
    bytes: int = 0


class Outbox:
    """Waiting messages of all peers of one socket."""

    def __init__(
        self, peer_bytes_max: int = PEER_BYTES_MAX, total_bytes_max: int = TOTAL_BYTES_MAX
    ) -> None:
        self._peer_bytes_max = peer_bytes_max
        self._total_bytes_max = total_bytes_max
        self._peers: dict[bytes, Waiting] = {}
        self.bytes = 0

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def peers(self) -> list[bytes]:
        return list(self._peers)

    def push(self, peer: bytes, frames: list[bytes], now_ns: int) -> list[bytes]:
        """Queue a message. Returns the peers to drop for it (already forgotten here): the peer
        itself if it is too far behind, or the ones with most waiting if all together are."""
        waiting = self._peers.get(peer)
        if waiting is None:
            waiting = self._peers[peer] = Waiting(now_ns)
        size = cost_bytes(frames)
        waiting.messages.append(frames)
        waiting.bytes += size
        self.bytes += size
        dropped: list[bytes] = []
        if waiting.bytes > self._peer_bytes_max and len(waiting.messages) > 1:
            dropped.append(peer)
            self.forget(peer)
        while self.bytes > self._total_bytes_max:
            largest = max(self._peers, key=lambda other: self._peers[other].bytes)
            dropped.append(largest)
            self.forget(largest)
        return dropped

    def first(self, peer: bytes) -> list[bytes] | None:
        """The peer's oldest message."""
        waiting = self._peers.get(peer)
        return waiting.messages[0] if waiting else None

    def sent(self, peer: bytes, now_ns: int) -> None:
        """The peer's oldest message left."""
        waiting = self._peers[peer]
        size = cost_bytes(waiting.messages.popleft())
        waiting.bytes -= size
        waiting.since_ns = now_ns
        self.bytes -= size
        if not waiting.messages:
            del self._peers[peer]

    def waiting_bytes(self, peer: bytes) -> int:
        """What waits for a peer takes so much memory."""
        waiting = self._peers.get(peer)
        return waiting.bytes if waiting else 0

    def stalled(self, peer: bytes, now_ns: int) -> bool:
        """Whether nothing left for this peer for too long."""
        waiting = self._peers.get(peer)
        return waiting is not None and now_ns - waiting.since_ns > STALL_NS

    def forget(self, peer: bytes) -> None:
        """Drop what waits for a peer. Idempotent."""
        waiting = self._peers.pop(peer, None)
        if waiting is not None:
            self.bytes -= waiting.bytes


def cost_bytes(frames: list[bytes]) -> int:
    """What a waiting message takes in memory, roughly."""
    return MESSAGE_BYTES + sum(map(len, frames))
