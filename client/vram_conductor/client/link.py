"""One client core and its socket: the part of the shell that the blocking and the asyncio client
share. Not thread-safe; whoever made it owns it.

The owner waits until :attr:`Link.pollable` has something or :meth:`Link.next_ns` has come, then
calls :meth:`Link.pump`. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import zmq

from vram_conductor.client.core import ClientCore
from vram_conductor.client.effects import (
    Answered,
    Connect,
    Down,
    Effect,
    Failed,
    Finished,
    Opened,
    RequestEffect,
    Warn,
)
from vram_conductor.client.session import Phase
from vram_conductor.protocol import handshake
from vram_conductor.protocol.codec import BROKER_TO_CLIENT, CLIENT_TO_BROKER
from vram_conductor.protocol.endpoints import Tcp, parse_endpoint
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.greeting import Handshakes
from vram_conductor.protocol.keys import KeyFile
from vram_conductor.protocol.messages import Error
from vram_conductor.protocol.sockets import Context, SendResult, Socket, connect, receive, send

log: logging.Logger = logging.getLogger("vram_conductor.client")

BATCH_MESSAGES = 256
"""Messages received before the owner gets a turn again."""

WARNINGS_MAX = 10
"""So many warnings are logged in full, later ones one in a thousand."""

Sink = Callable[[RequestEffect], None]
"""Takes what happens to one request; must not block and must not raise."""


class Link:
    """Carries out the core's effects.

    Args:
        core: the state machine; only this object and its owner touch it.
        endpoint: where the broker is.
        key: shown to the broker over tcp.

    Attributes:
        sinks: who waits for what, by ``rid`` (PING: by its number). An entry goes with the
            terminal effect. Other threads may add entries before they hand in the request.
        generation: grows whenever ``pollable`` changes.

    Raises:
        InvalidArgument: ``bad_endpoint``, ``ipc_path_too_long``.
    """

    def __init__(self, core: ClientCore, endpoint: str, key: KeyFile | None = None) -> None:
        self._key = key if isinstance(parse_endpoint(endpoint), Tcp) else None
        self.core = core
        self.sinks: dict[bytes, Sink] = {}
        self.generation: int = 0
        self._endpoint = endpoint
        self._context: Context = zmq.Context()
        self._socket: Socket | None = None
        self._monitor: Socket | None = None
        self._full = False
        self._broken = False
        self._handshakes = Handshakes(endpoint, self._key)
        self._failure: handshake.Failure | None = None
        self._warnings = 0

    @property
    def pollable(self) -> list[Socket]:
        """What to wait on for input: the socket and its monitor; empty before Connect."""
        return [part for part in (self._socket, self._monitor) if part is not None]

    @property
    def readable(self) -> bool:
        """Something can be received now; sending may eat the signal that would tell."""
        return any(int(part.getsockopt(zmq.EVENTS)) & zmq.POLLIN for part in self.pollable)

    @property
    def blocked(self) -> bool:
        """Something waits to be sent until the (first) socket is writable."""
        return self._full and bool(self.core.outgoing)

    def next_ns(self) -> int | None:
        """When to pump at the latest, on the monotonic clock."""
        return self.core.next_ns()

    def pump(self) -> bool:
        """Receive, handle, look at the clock, send. True if there may be more to receive."""
        more = self._receive()
        # Silence counts only after everything that is here was read.
        if not more:
            self.perform(self.core.tick(time.monotonic_ns()))
        self.flush()
        return more

    def perform(self, effects: Iterable[Effect]) -> None:
        """Act on effects, in order."""
        for effect in effects:
            if isinstance(effect, Connect):
                self._connect()
            elif isinstance(effect, Warn):
                self._warn(effect.text)
            elif isinstance(effect, Opened):
                log.info("session %s, broker %d", effect.session, effect.broker_epoch)
            elif isinstance(effect, Down):
                log.info("no session: %s", effect.error)
            else:
                self._deliver(effect)

    def flush(self) -> None:
        """Send what the socket takes now."""
        outgoing, socket = self.core.outgoing, self._socket
        self._full = False
        while outgoing and socket is not None:
            if send(socket, CLIENT_TO_BROKER.encode(outgoing[0])) is not SendResult.SENT:
                self._full = True
                return
            outgoing.popleft()

    def close(self) -> None:
        """Say BYE, fail what runs, close the socket. Waits at most LINGER_MS, and only where
        there is somebody to say it to. Idempotent."""
        linger_ms = None if self.core.phase is Phase.OPEN else 0
        if self.core.phase is not Phase.CLOSED:
            self.perform(self.core.close())
            self.flush()
        self._drop_socket(linger_ms=linger_ms)
        self._context.term()

    def abort(self) -> None:
        """Close the socket as it is, after something failed. Idempotent."""
        self._drop_socket(linger_ms=0)
        self._context.term()

    def _receive(self) -> bool:
        self._read_monitor()
        socket = self._socket
        for _ in range(BATCH_MESSAGES):
            # A socket that was replaced on the way has nothing to say any more.
            if socket is None or socket is not self._socket:
                return socket is not None
            received = receive(socket)
            if received is None:
                self._mourn()
                return False
            now_ns = time.monotonic_ns()
            try:
                message, _raw = BROKER_TO_CLIENT.decode(received.frames)
            except ConductorError as error:
                self.perform(self.core.bad(error, now_ns))
                continue
            self.perform(self.core.handle(message, now_ns))
        return True

    def _read_monitor(self) -> None:
        while self._monitor is not None and (news := receive(self._monitor)) is not None:
            event, value = handshake.read_news(news.frames)
            self._broken = self._broken or event != handshake.SUCCEEDED
            failure = self._handshakes.judge(event, value)
            if failure is not None:
                self._failure = failure

    def _mourn(self) -> None:
        """The connection counts as lost once all that came over it was read: a broker that stops
        says its last words and leaves."""
        if self._broken:
            self._broken = False
            failure, self._failure = self._failure, None
            if failure is not None and failure.final:
                # libzmq would go on asking.
                self._drop_socket(linger_ms=0)
                self.generation += 1
                refusal = Error(rid=b"", error=failure.error.info)
                self.perform(self.core.handle(refusal, time.monotonic_ns()))
            else:
                suspect = None if failure is None else failure.error
                self.perform(self.core.lost(time.monotonic_ns(), suspect))

    def _deliver(self, effect: RequestEffect) -> None:
        last = isinstance(effect, Answered | Finished | Failed)
        sink = self.sinks.pop(effect.rid, None) if last else self.sinks.get(effect.rid)
        if sink is not None:
            sink(effect)

    def _connect(self) -> None:
        self._drop_socket(linger_ms=0)
        self._broken, self._failure = False, None
        self._socket = connect(
            self._context, self._endpoint, prepare=self._attach_monitor, key=self._key
        )
        self.generation += 1

    def _attach_monitor(self, socket: Socket) -> None:
        # Without the monitor a lost connection would show only at the next missed heartbeat.
        self._monitor = socket.get_monitor_socket(handshake.EVENTS)

    def _drop_socket(self, linger_ms: int | None) -> None:
        if self._socket is None:
            return
        self._socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._socket = self._monitor = None

    def _warn(self, text: str) -> None:
        self._warnings += 1
        if self._warnings <= WARNINGS_MAX or self._warnings % 1000 == 0:
            log.warning("%s", text)
