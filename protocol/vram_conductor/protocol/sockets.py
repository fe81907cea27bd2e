"""ZeroMQ sockets with the options that make them safe (SPEC.md, "Transport")."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import zmq

from vram_conductor.protocol import limits

HWM = 10_000
LINGER_MS = 500


class SendResult(Enum):
    """What became of a message that was offered to a socket."""

    SENT = "sent"
    FULL = "full"
    """EAGAIN: the queue to this peer is full or not connected; try again when writable."""
    GONE = "gone"
    """EHOSTUNREACH: a ROUTER knows no such peer (any more)."""


class Received(NamedTuple):
    """One message. ``peer`` is the ROUTER's routing id, empty on a DEALER. Of a message with too
    many frames only the first FRAMES_MAX + 1 are here, so that the codec refuses it."""

    peer: bytes
    frames: list[bytes]


class Listener:
    """A bound ROUTER: ``socket``, the actual ``endpoint``, and for ipc its lock."""

    socket: zmq.Socket[bytes]
    endpoint: str

    def close(self) -> None:
        """Unlink the ipc path, close the socket, release the lock. Idempotent."""
        raise NotImplementedError


def listen(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, hwm: int = HWM) -> Listener:
    """Bind a ROUTER to ``tcp://127.0.0.1:PORT`` (0: any), ``ipc:///path`` or ``inproc://name``.

    Raises:
        InvalidArgument: ``bad_endpoint``: malformed, unsupported transport, path too long.
        FailedPrecondition: ``auth_required`` (tcp beyond loopback), ``endpoint_in_use`` (details
            ``pid`` where known), ``unsafe_directory`` (ipc folder open to other users).
        PermissionDenied, Unavailable: ``bind_failed``.
    """
    raise NotImplementedError


def connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, hwm: int = HWM
) -> zmq.Socket[bytes]:
    """A DEALER that connects (and reconnects) to ``endpoint``.

    IMMEDIATE is set: until the connection stands, ``send`` answers FULL; poll for POLLOUT.

    Raises:
        InvalidArgument: ``bad_endpoint``.
    """
    raise NotImplementedError


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes], peer: bytes = b"") -> SendResult:
    """Send without blocking; ``peer`` is the routing id for a ROUTER."""
    raise NotImplementedError


def receive(socket: zmq.Socket[bytes]) -> Received | None:
    """Receive without blocking; None if nothing is there. Surplus frames are drained."""
    raise NotImplementedError


__all__ = [
    "HWM",
    "LINGER_MS",
    "Listener",
    "Received",
    "SendResult",
    "connect",
    "limits",
    "listen",
    "receive",
    "send",
]
