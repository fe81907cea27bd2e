"""ZeroMQ sockets with the options that make them safe (SPEC.md, "Transport").

Why each option (measured with pyzmq 27.3): a ROUTER drops in silence for unknown peers and full
queues, so MANDATORY and never a blocking send; the default LINGER is for ever; MAXMSGSIZE is per
frame only, so the number of frames is capped on receipt; equal routing ids steal or mute, so
nobody ever sets one.

A DEALER does not have IMMEDIATE: with it, a connection that breaks between the two frames of a
message takes the process down (``Assertion failed: !_more (src/fq.cpp:80)``, libzmq 4.3.5; every
100th ``recv`` looks for such news), and what had arrived before is lost. Without it a DEALER queues
for an absent broker; whoever minds closes the socket when its monitor says DISCONNECTED.

Keys (CURVE): without ZAP_ENFORCE_DOMAIN a ROUTER takes any key while nobody answers ZAP. A refused
handshake says nothing to the DEALER but its monitor's HANDSHAKE_FAILED_… events.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import zmq

from vram_conductor.protocol import limits
from vram_conductor.protocol.endpoints import Ipc, Tcp, parse_endpoint
from vram_conductor.protocol.errors import FailedPrecondition, Unavailable
from vram_conductor.protocol.ipc_path import IpcPath, claim_ipc
from vram_conductor.protocol.keys import KeyFile, KeyPair

HWM = 10_000
"""Messages queued per peer and direction before ``send`` answers FULL."""

LINGER_MS = 500
"""How long closing waits for what was already accepted (BYE, the last ERROR)."""

ZMTP_HEARTBEAT_MS = 5_000
ZMTP_TIMEOUT_MS = 15_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 2_000

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class SendResult(Enum):
    """What became of a message that was offered to a socket."""

    SENT = "sent"
    FULL = "full"
    """EAGAIN: the queue to this peer is full; poll for POLLOUT."""
    GONE = "gone"
    """EHOSTUNREACH: the ROUTER knows no such peer (any more)."""


class Locked(NamedTuple):
    """That a ROUTER asks for keys: ``pair`` is its own, ``domain`` what ZAP is told of whom a peer
    wants to speak to."""

    pair: KeyPair
    domain: str


class Received(NamedTuple):
    """One message; ``peer`` is the ROUTER's routing id, empty on a DEALER.

    Of a message with too many frames only the first ``FRAMES_MAX + 1`` are here, so that the
    codec refuses it as ``bad_frames`` and the peer is told.
    """

    peer: bytes
    frames: list[bytes]


class Listener:
    """A bound ROUTER.

    Attributes:
        socket: the ROUTER.
        endpoint: what to connect to; port 0 is replaced by the real one.
        monitor: says what becomes of its connections, where that was asked for.
    """

    def __init__(
        self,
        socket: Socket,
        endpoint: str,
        ipc: IpcPath | None = None,
        monitor: Socket | None = None,
    ) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.monitor = monitor
        self._ipc = ipc

    def close(self) -> None:
        """Unlink the ipc path, close the socket, release the lock. Idempotent."""
        if self._ipc is not None:
            self._ipc.unlink()
        if self.monitor is not None and not self.socket.closed:
            self.socket.disable_monitor()
            self.monitor.close(0)
        self.socket.close()
        if self._ipc is not None:
            self._ipc.release()


def listen(
    context: Context,
    endpoint: str,
    *,
    hwm: int = HWM,
    locked: Locked | None = None,
    events: int = 0,
) -> Listener:
    """Bind a ROUTER to ``tcp://ADDRESS:PORT`` (0: any), ``ipc:///path`` or ``inproc://name``.

    ``locked``: over tcp, peers need a key that the context's ZAP handler takes; without it, an
    address beyond loopback is refused. ``events``: what the listener's ``monitor`` tells, zmq's
    EVENT_*; it is there before the first connection can be, which after a restart comes at once.

    Raises:
        InvalidArgument: ``bad_endpoint``, ``ipc_path_too_long``.
        FailedPrecondition: ``auth_required`` (tcp beyond loopback), ``endpoint_in_use`` (with
            ``pid`` for ipc), ``unsafe_directory`` (others could reach the ipc folder).
        Unavailable: ``bind_failed``: anything else the system says.
    """
    where = parse_endpoint(endpoint)
    if isinstance(where, Tcp) and not where.loopback and locked is None:
        raise FailedPrecondition(
            "auth_required",
            f"{endpoint} can be reached from other machines and there are no keys yet; make one, "
            "with this broker's configuration: conductor keys new NAME (for a worker: --role "
            "worker); or bind tcp://127.0.0.1:PORT or an ipc path",
            endpoint=endpoint,
        )
    ipc = claim_ipc(where.path) if isinstance(where, Ipc) else None
    socket = _open(context, zmq.ROUTER, hwm)
    monitor = socket.get_monitor_socket(events) if events else None
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if isinstance(where, Tcp) and locked is not None:
            _lock(socket, locked)
        if ipc is not None:
            socket.setsockopt(zmq.USE_FD, ipc.listen())
        socket.bind(where.zmq_endpoint)
    except (OSError, zmq.ZMQError) as error:
        Listener(socket, endpoint, ipc, monitor).close()
        raise _bind_error(endpoint, error) from None
    actual = where.zmq_endpoint
    if isinstance(where, Tcp):
        last = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(last, bytes)
        actual = last.rstrip(b"\0").decode()
    return Listener(socket, actual, ipc, monitor)


def connect(
    context: Context,
    endpoint: str,
    *,
    hwm: int = HWM,
    prepare: Callable[[Socket], object] | None = None,
    key: KeyFile | None = None,
) -> Socket:
    """A DEALER that connects, and reconnects, to ``endpoint``.

    What is sent before the connection stands is queued. ``prepare`` gets the socket before it
    connects: a monitor that is attached afterwards may miss the connection. ``key`` counts over
    tcp; the broker must have the one that it names, too.

    Raises:
        InvalidArgument: ``bad_endpoint``, ``ipc_path_too_long``.
    """
    where = parse_endpoint(endpoint)
    socket = _open(context, zmq.DEALER, hwm)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    if isinstance(where, Tcp) and key is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.broker.encode())
    if prepare is not None:
        prepare(socket)
    socket.connect(where.zmq_endpoint)
    return socket


def send(socket: Socket, frames: Sequence[bytes], peer: bytes = b"") -> SendResult:
    """Send without blocking; ``peer`` is the routing id where ``socket`` is a ROUTER."""
    message = [peer, *frames] if peer else frames
    try:
        socket.send_multipart(message, zmq.DONTWAIT)
    except zmq.Again:
        return SendResult.FULL
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            return SendResult.GONE
        raise
    return SendResult.SENT


def receive(socket: Socket) -> Received | None:
    """Receive without blocking; None if nothing is there. Surplus frames are drained, unkept."""
    try:
        frames = [socket.recv(zmq.DONTWAIT)]
    except zmq.Again:
        return None
    routed = socket.type == zmq.ROUTER
    most = limits.FRAMES_MAX + 1 + routed
    # The parts of one message are there together, so these do not block.
    while socket.rcvmore:
        part = socket.recv()
        if len(frames) < most:
            frames.append(part)
    return Received(frames[0], frames[1:]) if routed else Received(b"", frames)


def _open(context: Context, kind: int, hwm: int) -> Socket:
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, LINGER_MS),
        (zmq.SNDHWM, hwm),
        (zmq.RCVHWM, hwm),
        (zmq.IPV6, 0),
        (zmq.HANDSHAKE_IVL, limits.HELLO_TIMEOUT_MS),
        (zmq.HEARTBEAT_IVL, ZMTP_HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, ZMTP_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, ZMTP_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES_MAX)
    return socket


def _lock(socket: Socket, locked: Locked) -> None:
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, locked.pair.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, locked.pair.secret.encode())
    socket.setsockopt(zmq.ZAP_DOMAIN, locked.domain.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def _bind_error(endpoint: str, error: OSError | zmq.ZMQError) -> FailedPrecondition | Unavailable:
    if error.errno == errno.EADDRINUSE:
        return FailedPrecondition(
            "endpoint_in_use",
            f"{endpoint} is in use by another process; stop it or choose another port",
            endpoint=endpoint,
        )
    return Unavailable(
        "bind_failed",
        f"cannot bind {endpoint}: {error.strerror}; check the address and your permissions",
        endpoint=endpoint,
        errno=error.errno,
    )


__all__ = [
    "HWM",
    "Context",
    "Listener",
    "Locked",
    "Received",
    "SendResult",
    "Socket",
    "connect",
    "listen",
    "receive",
    "send",
]
