"""The IO thread: owns the DEALER to the broker.

Commands go to ``deliver`` (a thread-safe hand-over to the engine or estimator thread); what those
threads send comes through :meth:`Link.send`, which never waits. The decisions are in ``session``
and ``backlog``; this is the shell around them. A connection that is lost is replaced by a new one;
W_RESUME then goes on with the session where the broker holds it, READY opens a new one. Nothing is
handed to a socket before its connection stands.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from vram_conductor.protocol import handshake
from vram_conductor.protocol.codec import BROKER_TO_WORKER, WORKER_TO_BROKER
from vram_conductor.protocol.commands import (
    Ready,
    Resumed,
    ToWorker,
    WorkerPing,
    WorkerPong,
    WorkerRefused,
)
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.greeting import Handshakes
from vram_conductor.protocol.keys import KeyFile
from vram_conductor.protocol.sockets import SendResult, Socket, connect, receive, send
from vram_conductor.worker import watchdog
from vram_conductor.worker.backlog import Backlog
from vram_conductor.worker.farewell import log_loss
from vram_conductor.worker.inbound import Arrived, Inbound, ReadyWanted, Refused, SessionLost
from vram_conductor.worker.outbox import Sent
from vram_conductor.worker.session import Session, Verdict

log = logging.getLogger(__name__)

TICK_MS = 1_000
"""Longest sleep: the watchdog is asked at least this often."""

WELCOME_MS = 100
"""How long leaving waits for a session that may just be opening."""

RECEIVE_MAX = 256
"""Messages read in a row before the other duties get their turn."""

Progress = Callable[[], tuple[int, bool]]
"""Asks the engine's step counter and whether it should be counting; called on the IO thread."""


class Link:
    """The connection; start it with :meth:`start`.

    Args:
        endpoint: the broker's worker endpoint.
        deliver: takes what comes in; called on the IO thread, must not block.
        progress: asks the engine's work loop.
        hang_ms: leave the process when the engine hangs; 0 never does.
        key: shown to the broker over tcp.
    """

    def __init__(
        self,
        endpoint: str,
        deliver: Callable[[Inbound], None],
        progress: Progress,
        hang_ms: int = 0,
        key: KeyFile | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._key = key if endpoint.startswith("tcp://") else None
        self._handshakes = Handshakes(endpoint, self._key, patient=True)
        self._deliver = deliver
        self._progress = progress
        self._hang_ms = hang_ms
        # The watchdog's timer must be wound up well before it runs out.
        self._tick_ms = min(TICK_MS, max(1, hang_ms // 4)) if hang_ms else TICK_MS
        self._watch_ns = 0
        self._watchdog = watchdog.Watchdog(hang_ms, time.monotonic_ns())
        self._outgoing: deque[Sent] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._backlog = Backlog()
        self._session = Session(time.monotonic_ns())
        self._asked_engine = self._was_full = self._connected = self._warned = False
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: Socket = self._connect()  # bad endpoints are the caller's to hear about

    def start(self) -> None:
        """Start the IO thread."""
        self._thread.start()

    def send(self, *messages: Sent) -> None:
        """Queue messages. Any thread; never blocks."""
        self._outgoing.extend(messages)
        self.wake()

    def wake(self) -> None:
        """Let the IO thread look at what is new."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued (as far as the socket takes it) and end the thread."""
        self._session.leaving = True
        self._closing.set()
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # --- IO thread ----------------------------------------------------------------------------

    def _connect(self) -> Socket:
        self._connected = False
        socket = connect(self._context, self._endpoint, prepare=self._attach_monitor, key=self._key)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _attach_monitor(self, socket: Socket) -> None:
        self._monitor: Socket = socket.get_monitor_socket(handshake.EVENTS)

    def _run(self) -> None:
        try:
            while not self._closing.is_set() or self._leaves_later():
                ready = self._wait()
                now_ns = time.monotonic_ns()
                self._watch(now_ns)
                # This runs once per token: nothing is asked that the poller has told already.
                if self._monitor in ready:
                    self._read_monitor(now_ns)
                if self._socket in ready:
                    self._read_socket(now_ns)
                self._take_outgoing(woken=self._wake_fd in ready)
                self._duties(time.monotonic_ns())
                self._flush(time.monotonic_ns())
            if self._session.is_held or not self._session.is_open:
                # A welcome that is under way decides whether what is queued may leave.
                self._socket.poll(WELCOME_MS)
            self._read_socket(time.monotonic_ns())
            self._take_outgoing(woken=False)
            self._flush(time.monotonic_ns())
        except Exception:
            # Without this thread the worker is deaf; a restart is the only cure.
            log.exception("the IO thread failed")
            os._exit(watchdog.EXIT_HANG)
        finally:
            watchdog.unwind()
            self._disconnect()
            self._context.term()

    def _leaves_later(self) -> bool:
        """Over ipc, who hangs up is dead; a network that was cut may heal in time."""
        waits = self._endpoint.startswith("tcp:") and bool(self._outgoing or self._backlog)
        return waits and self._session.may_return(time.monotonic_ns())

    def _disconnect(self, linger_ms: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _reconnect(self) -> None:
        """A fresh socket: nothing of the last session may still lie in the old one."""
        self._disconnect(linger_ms=0)
        self._socket = self._connect()

    def _wait(self) -> dict[Any, int]:
        now_ns = time.monotonic_ns()
        timeout_ms = (self._session.next_ns(now_ns) - now_ns) // 1_000_000
        self._poller.modify(self._socket, zmq.POLLIN | (zmq.POLLOUT if self._was_full else 0))
        return dict(self._poller.poll(max(0, min(timeout_ms, self._tick_ms))))

    def _watch(self, now_ns: int) -> None:
        if not self._hang_ms or now_ns < self._watch_ns:
            return
        self._watch_ns = now_ns + self._tick_ms * 1_000_000 // 4
        watchdog.wind_up(self._hang_ms)
        steps, busy = self._progress()
        if self._watchdog.hangs(steps, busy, watchdog.io_bytes() if busy else 0, now_ns):
            watchdog.give_up(self._watchdog.stuck_ms(now_ns))
        if self._watchdog.paused_ms:
            log.warning("nothing here ran for %d ms: stopped?", self._watchdog.paused_ms)

    def _read_monitor(self, now_ns: int) -> None:
        while (news := receive(self._monitor)) is not None:
            event, value = handshake.read_news(news.frames)
            failure = self._handshakes.judge(event, value)
            if event == handshake.SUCCEEDED:
                self._connected, self._warned = True, False
                continue
            if failure is not None and failure.final:
                self._deliver(Refused(failure.error.info))
            elif failure is not None and not self._warned:
                self._warned = True
                log.warning("%s", failure.error)
            if event == handshake.DISCONNECTED and self._connected:  # else libzmq tries again
                self._lose("disconnected", now_ns)
                self._reconnect()

    def _read_socket(self, now_ns: int) -> None:
        for _ in range(RECEIVE_MAX):
            received = receive(self._socket)
            if received is None:
                return
            try:
                message, raw = BROKER_TO_WORKER.decode(received.frames)
            except ConductorError as error:
                log.warning("a message of the broker is not understood: %s", error)
                if error.reason == "unsupported_version":
                    self._deliver(Refused(error.info))
                continue
            self._judge(message, raw, now_ns)

    def _judge(self, message: ToWorker, raw: list[bytes], now_ns: int) -> None:
        match self._session.receive(message, now_ns):
            case Verdict.OPENED:
                self._backlog.begin(numbered=self._session.resume_ms > 0)
                log.info("session with the broker, epoch %d", self._session.broker_epoch)
                self._deliver(Arrived(message, raw))
            case Verdict.RESUMED:
                assert isinstance(message, Resumed)
                self._backlog.rewind(message.order)
                log.info("the connection is back: the session goes on")
            case Verdict.HAND:
                self._deliver(Arrived(message, raw))
            case Verdict.LOST:
                self._forget("the broker does not know this worker (any more)")
            case Verdict.REFUSED:
                assert isinstance(message, WorkerRefused)
                self._deliver(Refused(message.error))
            case Verdict.DROP:
                if isinstance(message, WorkerPong):
                    self._backlog.confirm(message.order)

    def _lose(self, why: str, now_ns: int) -> None:
        """The connection is gone, or as good as."""
        if self._session.hold(now_ns):
            log_loss(log, "connection lost: %s; the work goes on", why, self._session.leaving)
        elif self._session.lose():
            self._forget(why)

    def _forget(self, why: str) -> None:
        log_loss(log, "session lost: %s", why, self._session.leaving)
        self._backlog.clear()
        self._asked_engine = False
        self._deliver(SessionLost())

    def _take_outgoing(self, *, woken: bool) -> None:
        if woken:
            os.eventfd_read(self._wake_fd)
        while self._outgoing:
            message, raw = self._outgoing.popleft()
            needless = isinstance(message, Ready) and self._session.is_open
            if not needless and self._session.may_send(message):
                self._backlog.push(message, raw)

    def _duties(self, now_ns: int) -> None:
        if self._session.dead(now_ns):
            self._lose("the broker is silent", now_ns)
            self._reconnect()
        if self._session.held_too_long(now_ns) and self._session.lose():
            self._forget("there was no connection for too long")
        if self._session.ping_due(now_ns):
            steps, busy = self._progress()
            n, op = self._session.next_n(), self._session.op
            self._backlog.push(WorkerPing(n=n, steps=steps, busy=busy, op=op), [])
        if self._connected and self._session.resume_due(now_ns):
            # The connection is fresh: it has room.
            send(self._socket, WORKER_TO_BROKER.encode(self._session.resume(now_ns)))
        if self._connected and not self._asked_engine and self._session.ready_due(now_ns):
            self._asked_engine = True
            self._deliver(ReadyWanted())

    def _flush(self, now_ns: int) -> None:
        self._was_full = False
        while not self._session.is_held and (entry := self._backlog.first()) is not None:
            if not self._connected:
                return
            assert entry.message is not None
            allowed = self._session.may_send(entry.message)
            if allowed:
                frames = WORKER_TO_BROKER.encode(entry.message, entry.raw)
                if send(self._socket, frames) is SendResult.FULL:
                    self._was_full = True
                    return
                self._session.sent(now_ns)
                if isinstance(entry.message, Ready):
                    self._asked_engine = False
                    self._session.said_ready(entry.message, now_ns)
            self._backlog.drop_first(sent=allowed)
