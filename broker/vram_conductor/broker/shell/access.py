"""Keys at work: the ZAP handler of both ROUTERs, and the list of keys while it changes.

ZAP (ZeroMQ RFC 27, https://rfc.zeromq.org/spec/27/): libzmq asks over ``inproc://zeromq.zap.01``
whether a key may connect, and goes on with other connections until the answer comes. So no thread
is needed: the broker's loop polls this socket like the others, and keys have one owner. The
answer's user id, the public half, comes with every message of the connection.
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.utils.z85

from vram_conductor.broker.events import KeysChanged
from vram_conductor.broker.shell.auth import CLIENTS, WORKERS, Identity, identity_of, may_enter
from vram_conductor.broker.shell.logs import Log
from vram_conductor.protocol.endpoints import Tcp, parse_endpoint
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.key_files import KeyFolder
from vram_conductor.protocol.keys import Key, quotas
from vram_conductor.protocol.sockets import Context, Locked, Socket

ZAP_ENDPOINT = "inproc://zeromq.zap.01"

LOOK_NS = 200_000_000
"""How often the list is looked at: a revoked key is out within a second."""

ANSWERS_PER_TURN = 64

LOGGED_PER_LOOK = 4
"""Refusals that are logged between two looks: strangers must not fill a disk."""


class Access:
    """Whom the broker lets in, where it has keys.

    Args:
        context: of the ROUTERs.
        folder: where the keys are; there must be some.
        log: takes a line for every refused handshake, up to a bound.

    Attributes:
        socket: the ZAP handler; to be polled, then call :meth:`answer`.

    Raises:
        NotFound, FailedPrecondition, InvalidArgument: the keys cannot be read, see ``KeyFolder``.
    """

    def __init__(self, context: Context, folder: Path, log: Log) -> None:
        self._folder = KeyFolder(folder)
        self._log = log
        self._pair = self._folder.pair()
        self._stamp: tuple[int, int, int] | None = self._folder.stamp()
        self._keys: dict[str, Key] = self._folder.read().valid()
        self._trouble = ""
        self._look_ns = 0
        self._logged = 0
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def locked(self, domain: str) -> Locked:
        """What ``sockets.listen`` needs for one of the two ROUTERs."""
        return Locked(self._pair, domain)

    def client(self, user: str) -> Identity | None:
        """Who a client is; None: its key was revoked since."""
        key = self._keys.get(user)
        return identity_of(key) if key is not None and may_enter(key, CLIENTS) else None

    def worker(self, user: str) -> Key | None:
        """A worker's key; None: it was revoked since."""
        key = self._keys.get(user)
        return key if may_enter(key, WORKERS) else None

    def changed(self) -> KeysChanged:
        """What the core is told, at the start and after every change."""
        return KeysChanged(
            quotas(self._keys), {key.public: key.principal for key in self._keys.values()}
        )

    def next_deadline_ns(self) -> int:
        """When to call :meth:`look` at the latest."""
        return self._look_ns

    def look(self, now_ns: int) -> bool:
        """Whether the list has changed. What cannot be read leaves it as it was."""
        if now_ns < self._look_ns:
            return False
        self._look_ns, self._logged = now_ns + LOOK_NS, 0
        try:
            stamp = self._folder.stamp()
            if stamp == self._stamp:
                return False
            keys = self._folder.read().valid()
        except ConductorError as error:
            if error.info.message != self._trouble:
                self._trouble = error.info.message
                self._log("error", "broker.keys_unreadable", why=self._trouble)
            return False
        self._stamp, self._trouble, self._keys = stamp, "", keys
        self._log("info", "broker.keys_changed", keys=len(keys))
        return True

    def answer(self) -> None:
        """Answer libzmq's questions."""
        for _ in range(ANSWERS_PER_TURN):
            try:
                request = self.socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self.socket.send_multipart(self._reply(request))

    def close(self) -> None:
        self.socket.close()

    def _reply(self, request: list[bytes]) -> list[bytes]:
        version, number, domain, address, _, mechanism, *credentials = request
        public = ""
        if mechanism == b"CURVE" and len(credentials) == 1:
            public = zmq.utils.z85.encode(credentials[0]).decode()
        if may_enter(self._keys.get(public), domain.decode("ascii", "replace")):
            return [version, number, b"200", b"OK", public.encode(), b""]
        self._logged += 1
        if self._logged <= LOGGED_PER_LOOK:
            where = domain.decode("ascii", "replace")
            host = address.decode("ascii", "replace")
            why = "it is unknown, revoked, or for the other endpoint"
            self._log("warning", "broker.key_refused", at=where, host=host, public=public, why=why)
        return [version, number, b"400", b"no such key", b"", b""]


def open_access(
    context: Context, folder: Path, endpoints: tuple[str, str], log: Log
) -> Access | None:
    """Keys, where an endpoint is tcp and there are any. Raises as :class:`Access`."""
    tcp = any(isinstance(parse_endpoint(endpoint), Tcp) for endpoint in endpoints)
    return Access(context, folder, log) if tcp and KeyFolder(folder).exists else None
