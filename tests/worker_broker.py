"""The broker as a worker sees it, doing only what a test says: a real ROUTER socket.

Used by tests of the link and of the worker process. Single-threaded: nothing is received but in
``expect``, ``pump`` and ``ready``; pings are answered there unless ``mute``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import zmq

from vram_conductor.protocol.base import Base
from vram_conductor.protocol.codec import BROKER_TO_WORKER, WORKER_TO_BROKER
from vram_conductor.protocol.commands import (
    Command,
    Failed,
    Ready,
    Reply,
    Run,
    RunDone,
    RunTokens,
    Started,
    WorkerPing,
    WorkerPong,
    WorkerWelcome,
)
from vram_conductor.protocol.sockets import SendResult, listen, receive, send
from vram_conductor.protocol.values import ConversationKey

PATIENCE_S = 30.0
M = TypeVar("M", bound=Base)


class WorkerBroker:
    """See the module.

    Attributes:
        received: (peer, message, raw) of everything but pings, in order of arrival.
        pings: the pings.
        peer: who said READY last.
    """

    def __init__(self, endpoint: str, *, epoch: int = 1, heartbeat_ms: int = 500) -> None:
        self.epoch = epoch
        self.heartbeat_ms = heartbeat_ms
        self.mute = False
        self.received: list[tuple[bytes, Any, list[bytes]]] = []
        self.pings: list[WorkerPing] = []
        self.peer = b""
        self._taken = 0
        self._op = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = listen(self._context, endpoint)

    def __enter__(self) -> WorkerBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._listener.close()
        self._context.destroy(linger=0)

    def pump(self, timeout_ms: int = 20) -> None:
        """Receive what is there, at most waiting ``timeout_ms`` for the first message."""
        self._listener.socket.poll(timeout_ms)
        while (item := receive(self._listener.socket)) is not None:
            message, raw = WORKER_TO_BROKER.decode(item.frames)
            if isinstance(message, WorkerPing):
                self.pings.append(message)
                if not self.mute:
                    pong = BROKER_TO_WORKER.encode(WorkerPong(n=message.n))
                    send(self._listener.socket, pong, item.peer)  # it may have left meanwhile
                continue
            if isinstance(message, Ready):
                self.peer = item.peer
            self.received.append((item.peer, message, raw))

    def expect(
        self,
        kind: type[M],
        where: Callable[[M], bool] = lambda message: True,
        patience_s: float = PATIENCE_S,
    ) -> tuple[M, list[bytes]]:
        """The next message of this type that was not taken yet; others before it are skipped."""
        until = time.monotonic() + patience_s
        while True:
            while self._taken < len(self.received):
                _, message, raw = self.received[self._taken]
                self._taken += 1
                if isinstance(message, kind) and where(message):
                    return message, raw
            if time.monotonic() > until:
                kinds = [type(message).__name__ for _, message, _ in self.received]
                raise AssertionError(f"no {kind.__name__} within {patience_s} s; got {kinds}")
            self.pump()

    def until(self, check: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Receive until ``check()``."""
        deadline = time.monotonic() + patience_s
        while not check():
            assert time.monotonic() < deadline, f"not within {patience_s} s: {what}"
            self.pump(2)

    def ready(self, conversations: list[ConversationKey] | None = None) -> Ready:
        """Take a READY and welcome the worker."""
        message, _ = self.expect(Ready)
        self.welcome(conversations)
        return message

    def welcome(self, conversations: list[ConversationKey] | None = None) -> None:
        self.send(
            WorkerWelcome(
                v=(1, 0),
                broker_epoch=self.epoch,
                heartbeat_ms=self.heartbeat_ms,
                conversations=conversations or [],
            )
        )

    def send(self, message: Base, raw: list[bytes] | None = None, peer: bytes = b"") -> None:
        frames = BROKER_TO_WORKER.encode(message, raw or [])
        assert send(self._listener.socket, frames, peer or self.peer) is SendResult.SENT

    def command(self, kind: type[Command], raw: list[bytes] | None = None, **fields: Any) -> int:
        """Send a command of the current epoch; returns its ``op``."""
        self._op += 1
        self.send(kind(broker_epoch=self.epoch, op=self._op, **fields), raw)
        return self._op

    def answer(self, op: int, kind: type[M] | None = None) -> M:
        """The reply to ``op``; must be of ``kind``."""
        found, _ = self.expect(Reply, lambda message: message.op == op)
        assert kind is None or isinstance(found, kind), found
        return found  # type: ignore[return-value]

    def run(self, raw: list[bytes] | None = None, **fields: Any) -> Attempt:
        """Send RUN and follow the attempt to its end."""
        op = self.command(Run, raw, **fields)
        return self.follow(op)

    def follow(self, op: int) -> Attempt:
        """Collect an attempt's output until RUN_DONE or FAILED."""
        attempt = Attempt()
        while True:
            message, raw = self.expect(Reply, lambda found: found.op == op)
            match message:
                case Started():
                    attempt.started, attempt.prompt = message, raw[0]
                case RunTokens():
                    attempt.text += message.text
                    attempt.ids += message.ids
                case RunDone():
                    attempt.done = message
                    return attempt
                case Failed():
                    attempt.failed = message
                    return attempt
                case _:
                    raise AssertionError(message)


class Attempt:
    """What came back for one RUN."""

    def __init__(self) -> None:
        self.started: Started | None = None
        self.prompt = b""
        self.text = ""
        self.ids: list[int] = []
        self.done: RunDone | None = None
        self.failed: Failed | None = None
