"""The worker's side of its session with the broker. *Pure.*

::

    away ──READY sent──▶ asking ──W_WELCOME──▶ open ──disconnected, silent──▶ held
      ▲                                        │  ▲                            │
      │                                        │  └───────── W_RESUMED ────────┤
      └──────────────── W_NO_SESSION ──────────┴──── held for too long ────────┘

A session that is lost voids everything that was under way: the broker sees it the same way. One
that is held goes on when the connection is back. Where the broker holds none, ``open`` is followed
by ``away``. Only commands of the current broker epoch pass, and only replies to them leave.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import (
    Command,
    Drain,
    NoSession,
    Ready,
    Reply,
    Residency,
    Resume,
    Resumed,
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
    RESUMED = "the session goes on"
    LOST = "the session is gone; say READY"
    REFUSED = "leave"


class Session:
    """State of the session; all times are monotonic nanoseconds.

    Attributes:
        op: of the last command that has arrived.
        resume_ms: how long the broker holds the session while there is no connection.
        leaving: this worker was told to leave, or does: it needs no session any more.
    """

    def __init__(self, now_ns: int) -> None:
        self.broker_epoch: int | None = None
        self.op = 0
        self.resume_ms = 0
        self.leaving = False
        self._device, self._worker_epoch = "", 0
        self._held_ns: int | None = None
        self._asked_ns: int | None = None
        self._heartbeat_ms = limits.HEARTBEAT_MS
        self._liveness = Liveness(now_ns, self._heartbeat_ms)
        self._n = 0

    @property
    def is_open(self) -> bool:
        """Whether there is one, also while it is held."""
        return self.broker_epoch is not None

    @property
    def is_held(self) -> bool:
        """Whether it waits for a connection: nothing may leave but W_RESUME."""
        return self._held_ns is not None

    def lose(self) -> bool:
        """The session is over; whether there was one to lose."""
        had = self.is_open or self._asked_ns is not None
        self.broker_epoch = self._asked_ns = self._held_ns = None
        return had

    def hold(self, now_ns: int) -> bool:
        """The connection is gone. Whether the session can go on over another one."""
        if not self.is_open or not self.resume_ms:
            return False
        if self._held_ns is None:
            self._held_ns = now_ns
        self._asked_ns = None
        return True

    def held_too_long(self, now_ns: int) -> bool:
        """Whether the broker has surely given the session up by now. It may notice a silence
        later than we do."""
        return self._held_ns is not None and now_ns >= self._given_up_ns(self._held_ns)

    def may_return(self, now_ns: int) -> bool:
        """Whether a connection that came now would find the session still held."""
        return self._held_ns is not None and now_ns < self._held_ns + self.resume_ms * 1_000_000

    def _given_up_ns(self, held_ns: int) -> int:
        silence_ms = self._heartbeat_ms * limits.MISSED_HEARTBEATS_MAX
        return held_ns + (self.resume_ms + silence_ms) * 1_000_000

    def ready_due(self, now_ns: int) -> bool:
        """Whether to say READY (again)."""
        return not self.is_open and self._ask_due(now_ns)

    def resume_due(self, now_ns: int) -> bool:
        """Whether to say W_RESUME (again)."""
        return self.is_held and self._ask_due(now_ns)

    def _ask_due(self, now_ns: int) -> bool:
        asked = self._asked_ns
        return asked is None or now_ns - asked >= READY_AGAIN_MS * 1_000_000

    def said_ready(self, ready: Ready, now_ns: int) -> None:
        """READY has been handed to the socket."""
        self._device, self._worker_epoch = ready.device.device, ready.worker_epoch
        self._asked_ns = now_ns

    def resume(self, now_ns: int) -> Resume:
        """W_RESUME; counts as sent."""
        assert self.broker_epoch is not None
        self._asked_ns = now_ns
        return Resume(
            device=self._device,
            broker_epoch=self.broker_epoch,
            worker_epoch=self._worker_epoch,
            op=self.op,
        )

    def receive(self, message: ToWorker, now_ns: int) -> Verdict:
        """Judge a message."""
        self._liveness.heard(now_ns)
        match message:
            case WorkerWelcome():
                self.broker_epoch = message.broker_epoch
                self.op, self.resume_ms = 0, max(0, message.resume_ms)
                self._heartbeat_ms = max(1, message.heartbeat_ms)
                self._stand(now_ns)
                return Verdict.OPENED
            case Resumed():
                if not self.is_held:
                    return Verdict.DROP
                self._stand(now_ns)
                return Verdict.RESUMED
            case NoSession():
                # While READY is under way this answers something that we sent before it.
                if not self.is_open:
                    return Verdict.DROP
                self.lose()
                return Verdict.LOST
            case WorkerRefused():
                return Verdict.REFUSED
            case WorkerPong():
                return Verdict.DROP
            case Command():
                return Verdict.HAND if self._is_news(message) else Verdict.DROP
        return Verdict.DROP

    def _stand(self, now_ns: int) -> None:
        """The session stands on a connection."""
        self._asked_ns = self._held_ns = None
        self._liveness = Liveness(now_ns, self._heartbeat_ms)

    def _is_news(self, command: Command) -> bool:
        if command.broker_epoch != self.broker_epoch:
            return False
        # What arrived before a cut may come again after it.
        if self.resume_ms and command.op <= self.op:
            return False
        self.op = max(self.op, command.op)
        self.leaving = self.leaving or isinstance(command, Drain)
        return True

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
        return self.is_open and not self.is_held and self._liveness.ping_due(now_ns)

    def next_n(self) -> int:
        """Number of the next W_PING."""
        self._n += 1
        return self._n

    def dead(self, now_ns: int) -> bool:
        """Whether the broker has been silent for too long."""
        return self.is_open and not self.is_held and self._liveness.dead(now_ns)

    def next_ns(self, now_ns: int) -> int:
        """When to ask again at the latest."""
        if self.is_open and not self.is_held:
            return self._liveness.next_ns()
        asked = now_ns if self._asked_ns is None else self._asked_ns
        again_ns = asked + READY_AGAIN_MS * 1_000_000
        if self._held_ns is None:
            return again_ns
        return min(again_ns, self._given_up_ns(self._held_ns))
