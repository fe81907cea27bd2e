"""Notices at once that a ROUTER's peer has gone, even when nothing is being sent to it.

libzmq tells which descriptor was closed (socket monitor) and with every message which descriptor
it came from (ZMQ_SRCFD). A closed descriptor's number may already belong to somebody new when we
hear of it, so the news is only a hint: a probe (a PONG nobody asked for) decides. EHOSTUNREACH
can lag behind the news by some milliseconds, hence more than one probe.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from vram_conductor.protocol.sockets import Socket

PROBE_AFTER_NS = (1_000_000, 10_000_000, 100_000_000)


class PeerWatch:
    """Watches one ROUTER.

    Args:
        socket: the ROUTER.
        alive: sends the probe; False if the peer is unknown to the socket.
    """

    def __init__(self, socket: Socket, alive: Callable[[bytes], bool]) -> None:
        self._socket = socket
        self._alive = alive
        self._peers_of: dict[int, set[bytes]] = {}
        self._fd_of: dict[bytes, int] = {}
        self._probes: list[tuple[int, bytes]] = []
        self.monitor: Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def known(self, peer: bytes) -> bool:
        """Whether ``met`` was called for this connection."""
        return peer in self._fd_of

    def met(self, peer: bytes, fd: int, now_ns: int) -> None:
        """The first message of a connection arrived over ``fd`` (negative: it has none).

        Another peer with the same descriptor is gone, or this is a late message of one that is:
        the order of the two messages does not tell, the probes do.
        """
        self._fd_of[peer] = fd
        if fd < 0:
            return
        same = self._peers_of.setdefault(fd, set())
        same.add(peer)
        if len(same) > 1:
            self._suspect(fd, now_ns)

    def forget(self, peer: bytes) -> None:
        """The peer is gone. Idempotent."""
        same = self._peers_of.get(fd := self._fd_of.pop(peer, -1))
        if same is not None:
            same.discard(peer)
            if not same:
                del self._peers_of[fd]

    def read_monitor(self, now_ns: int) -> None:
        """Take in all news of closed connections."""
        while self.monitor.poll(0):
            news = recv_monitor_message(self.monitor, zmq.DONTWAIT)
            self._suspect(int(news["value"]), now_ns)

    def _suspect(self, fd: int, now_ns: int) -> None:
        for peer in self._peers_of.get(fd, ()):
            self._probes += [(now_ns + after, peer) for after in PROBE_AFTER_NS]
        self._probes.sort()

    def probe(self, now_ns: int) -> list[bytes]:
        """Send the probes that are due; returns the peers that are gone."""
        gone: list[bytes] = []
        while self._probes and self._probes[0][0] <= now_ns:
            _, peer = self._probes.pop(0)
            if self.known(peer) and not self._alive(peer):
                self.forget(peer)
                gone.append(peer)
        return gone

    def next_deadline_ns(self) -> int | None:
        """When to call ``probe``."""
        return self._probes[0][0] if self._probes else None

    def close(self) -> None:
        self._socket.disable_monitor()
        self.monitor.close(0)
