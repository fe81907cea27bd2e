"""The worker's side of its session with the broker. *Pure.*

::

    away ──READY sent──▶ asking ──W_WELCOME──▶ open
      ▲                                          │
      └── disconnected, silent, W_NO_SESSION ────┘

A session that is lost voids everything that was under way: the broker sees it the same way. Only
commands of the current broker epoch pass, and only replies to them leave.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import (
    Command,
    NoSession,
    Ready,
    Reply,
    Residency,
    ToWorker,
    WorkerBye,
    WorkerPong,
    WorkerRefused,
    WorkerWelcome,
)
from vram_conductor.protocol.liveness import Liveness

READY_AGAIN_MS = limits.HELLO_TIMEOUT_MS
"""READY is repeated after so long without an answer (on the same connection, where the broker
takes it as the same)."""


class Verdict(Enum):
    """What to do with a message from the broker."""

    HAND = "hand it to the engine"
    DROP = "it is of another life, or was for us only"
    OPENED = "the session is open; hand it to the engine too"
    LOST = "the session is gone; say READY"
    REFUSED = "leave"


class Session:
    """State of the session; all times are monotonic nanoseconds."""

    def __init__(self, now_ns: int) -> None:
        self.broker_epoch: int | None = None
        self._asked_ns: int | None = None
        self._heartbeat_ms = limits.HEARTBEAT_MS
        self._liveness = Liveness(now_ns, self._heartbeat_ms)
        self._n = 0

    @property
    def is_open(self) -> bool:
        return self.broker_epoch is not None

    def lose(self, now_ns: int) -> bool:
        """The connection is gone; whether there was a session to lose."""
        had = self.is_open or self._asked_ns is not None
        self.broker_epoch = self._asked_ns = None
        return had

    def ready_due(self, now_ns: int) -> bool:
        """Whether to say READY (again)."""
        if self.is_open:
            return False
        asked = self._asked_ns
        return asked is None or now_ns - asked >= READY_AGAIN_MS * 1_000_000

    def said_ready(self, now_ns: int) -> None:
        """READY has been handed to the socket."""
        self._asked_ns = now_ns

    def receive(self, message: ToWorker, now_ns: int) -> Verdict:
        """Judge a message."""
        self._liveness.heard(now_ns)
        match message:
            case WorkerWelcome():
                self.broker_epoch = message.broker_epoch
                self._asked_ns = None
                self._heartbeat_ms = max(1, message.heartbeat_ms)
                self._liveness = Liveness(now_ns, self._heartbeat_ms)
                return Verdict.OPENED
            case NoSession():
                # While READY is under way this answers something that we sent before it.
                if not self.is_open:
                    return Verdict.DROP
                self.lose(now_ns)
                return Verdict.LOST
            case WorkerRefused():
                return Verdict.REFUSED
            case WorkerPong():
                return Verdict.DROP
            case Command():
                return Verdict.HAND if message.broker_epoch == self.broker_epoch else Verdict.DROP
        return Verdict.DROP

    def may_send(self, message: msgspec.Struct) -> bool:
        """Whether a message belongs to this session."""
        # A broker that has READY counts on the worker before its welcome is read here; one that
        # has not takes no notice of a W_BYE.
        if isinstance(message, Ready | WorkerBye):
            return True
        if isinstance(message, Reply | Residency):
            return self.is_open and message.broker_epoch == self.broker_epoch
        return self.is_open

    def sent(self, now_ns: int) -> None:
        """Something has been handed to the socket."""
        self._liveness.sent(now_ns)

    def ping_due(self, now_ns: int) -> bool:
        """Whether to send W_PING now; True counts as sent."""
        return self.is_open and self._liveness.ping_due(now_ns)

    def next_n(self) -> int:
        """Number of the next W_PING."""
        self._n += 1
        return self._n

    def dead(self, now_ns: int) -> bool:
        """Whether the broker has been silent for too long."""
        return self.is_open and self._liveness.dead(now_ns)

    def next_ns(self, now_ns: int) -> int:
        """When to ask again at the latest."""
        if self.is_open:
            return self._liveness.next_ns()
        asked = now_ns if self._asked_ns is None else self._asked_ns
        return asked + READY_AGAIN_MS * 1_000_000
