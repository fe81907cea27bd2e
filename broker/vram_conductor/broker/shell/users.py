"""Whom the ZAP handler has let in, connection by connection, and who has to go again."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from vram_conductor.protocol.errors import InvalidArgument

_GIVEN_ID_BYTES = 5
"""Of a routing id that libzmq gives: a zero and a 32-bit number that begins anywhere."""

FAREWELL_NS = 100_000_000
"""From the last word to a peer to hanging up on it: libzmq sends in a thread of its own."""


class Users:
    """The users of one ROUTER's connections."""

    def __init__(self) -> None:
        self._users: dict[bytes, str] = {}
        self._leaving: dict[bytes, int] = {}

    def met(self, peer: bytes, frame: zmq.Frame) -> None:
        """The first message of a connection; its metadata were set by libzmq, not by the peer."""
        try:
            self._users[peer] = str(frame.get("User-Id"))
        except zmq.ZMQError:  # nobody was asked who this is
            self._users.pop(peer, None)

    def check(self, peer: bytes, frame: zmq.Frame) -> None:
        """Where users are known, a message must be its peer's. The routing id of a connection
        that has just ended could be taken by another one that chooses it, and with it the session
        and what is on its way there; so nobody may choose one.

        Raises:
            InvalidArgument: ``bad_frames``.
        """
        user = self._users.get(peer)
        if user is None:
            return
        given = len(peer) == _GIVEN_ID_BYTES and peer[0] == 0
        if not given or str(frame.get("User-Id")) != user:
            raise InvalidArgument(
                "bad_frames", "the routing id is not this connection's own; do not choose one"
            )

    def of(self, peer: bytes) -> str:
        """The peer's user; empty where nobody was asked."""
        return self._users.get(peer, "")

    def forget(self, peer: bytes) -> None:
        """The connection is closed. Idempotent."""
        self._users.pop(peer, None)
        self._leaving.pop(peer, None)

    def expel(self, peer: bytes, now_ns: int) -> None:
        """Hang up on a peer once it could have read what it was sent. Idempotent."""
        self._leaving.setdefault(peer, now_ns + FAREWELL_NS)

    def expel_strangers(self, welcome: Callable[[str], object], now_ns: int) -> None:
        """:meth:`expel` everybody whose user is not welcome any more."""
        for peer, user in self._users.items():
            if not welcome(user):
                self.expel(peer, now_ns)

    def take_due(self, now_ns: int) -> list[bytes]:
        """The peers to hang up on now."""
        due = [peer for peer, at_ns in self._leaving.items() if at_ns <= now_ns]
        for peer in due:
            del self._leaving[peer]
        return due

    def next_ns(self) -> int | None:
        """When to call :meth:`take_due`."""
        return min(self._leaving.values(), default=None)
