"""Notices at once that a ROUTER's peer has gone, even when nothing is being sent to it.

libzmq tells which descriptors were opened and closed (socket monitor), and with every message
over which descriptor it came (ZMQ_SRCFD). The kernel gives the number of a closed descriptor to
the next connection, so the order of the news matters: a connection's opening is reported before
its first message can be read, and the closing of its predecessor before that. Whoever reads all
news before he notes a new peer therefore never buries a living one.

A connection may be closed by a process that lives on (it reconnects, a tunnel broke) or because
the process has ended. Over ipc the kernel tells which.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

import zmq

from vram_conductor.broker.shell.peer_process import address_of, hang_up, has_ended, pid_of
from vram_conductor.protocol.sockets import Socket

LAST_WORDS_NS = 5_000_000
"""A peer counts as gone this long after its connection was closed: what it sent before is still
being read."""

PROCESS_END_NS = 100_000_000
"""The kernel closes the files of a dying process a moment before the process is over: for so long
its end is waited for. A peer that lives on is buried so much later, which harms nobody."""

EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
"""What the monitor has to tell. It must do so from before the ROUTER is bound: a connection whose
opening was missed looks like one that is closed, and its peer would be buried with each message."""

_NEWS = struct.Struct("=HI")


class Gone(NamedTuple):
    """A peer whose connection is lost. ``dead``: its process has ended, so nobody comes back."""

    peer: bytes
    dead: bool


class _Leaving(NamedTuple):
    """A peer whose connection was closed: to be looked at ``at_ns``, gone at ``until_ns``."""

    at_ns: int
    peer: bytes
    until_ns: int


class PeerWatch:
    """Watches one ROUTER.

    Args:
        monitor: of the ROUTER, for ``EVENTS``: to be polled; then call ``read_news``.
    """

    def __init__(self, monitor: Socket) -> None:
        self.monitor = monitor
        self._open: set[int] = set()
        self._peers_of: dict[int, set[bytes]] = {}
        self._fd_of: dict[bytes, int] = {}
        self._pid_of: dict[bytes, int] = {}
        self._address_of: dict[bytes, object] = {}
        self._leaving: deque[_Leaving] = deque()

    def known(self, peer: bytes) -> bool:
        """Whether ``met`` was called for this connection."""
        return peer in self._fd_of

    def met(self, peer: bytes, fd: int, now_ns: int) -> None:
        """The first message of a connection arrived over ``fd`` (negative: it has none)."""
        self.read_news(now_ns)
        self._fd_of[peer] = fd
        if fd < 0:
            return
        self._peers_of.setdefault(fd, set()).add(peer)
        if fd in self._open:
            self._pid_of[peer] = pid_of(fd)
            self._address_of[peer] = address_of(fd)
        else:
            # It said something and left before we looked.
            self._closed(fd, now_ns)

    def lost(self, peer: bytes, now_ns: int) -> None:
        """A send found out that the connection is closed. Idempotent."""
        same = self._peers_of.get(self._fd_of.setdefault(peer, -1), set())
        if peer in same or not any(entry.peer == peer for entry in self._leaving):
            same.discard(peer)
            self._leave(peer, now_ns)

    def forget(self, peer: bytes) -> None:
        """The peer is gone. Idempotent."""
        self._pid_of.pop(peer, None)
        self._address_of.pop(peer, None)
        fd = self._fd_of.pop(peer, -1)
        same = self._peers_of.get(fd)
        if same is not None:
            same.discard(peer)
            if not same:
                del self._peers_of[fd]

    def hang_up(self, peer: bytes, now_ns: int) -> None:
        """Close a connection; what libzmq has not sent by now is lost. The peer is gone soon."""
        self.read_news(now_ns)
        fd = self._fd_of.get(peer, -1)
        if fd in self._open:
            hang_up(fd, self._address_of.get(peer))

    def read_news(self, now_ns: int) -> None:
        """Take in all news of opened and closed connections."""
        while True:
            try:
                news = self.monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            event, fd = _NEWS.unpack_from(news[0])
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(fd)
            else:
                self._closed(fd, now_ns)

    def left(self, now_ns: int) -> list[Gone]:
        """The peers that are gone since the last call; forgotten here."""
        gone: list[Gone] = []
        while self._leaving and self._leaving[0].at_ns <= now_ns:
            _, peer, until_ns = self._leaving.popleft()
            pid = self._pid_of.get(peer, 0)
            dead = has_ended(pid)
            if pid and not dead and now_ns < until_ns:
                self._leaving.append(_Leaving(now_ns + LAST_WORDS_NS, peer, until_ns))
            elif self.known(peer):
                self.forget(peer)
                gone.append(Gone(peer, dead))
        return gone

    def next_deadline_ns(self) -> int | None:
        """When to call ``left``."""
        return self._leaving[0].at_ns if self._leaving else None

    def _closed(self, fd: int, now_ns: int) -> None:
        self._open.discard(fd)
        for peer in self._peers_of.pop(fd, ()):
            self._leave(peer, now_ns)

    def _leave(self, peer: bytes, now_ns: int) -> None:
        self._leaving.append(_Leaving(now_ns + LAST_WORDS_NS, peer, now_ns + PROCESS_END_NS))
