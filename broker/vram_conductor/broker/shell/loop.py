"""The broker's loop: sockets and clock on one side, the pure core on the other.

One thread, one Poller. A turn reads a bounded number of messages from each socket in turn,
hands each to the core, carries out the effects in order, and looks at what is due. Nothing in
here blocks, except the disk for an agent's record.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import zmq

from vram_conductor.broker.effects import Append, Effect, Exit, Log, SendClient, SendWorker
from vram_conductor.broker.events import (
    ClientBad,
    ClientFlow,
    ClientGone,
    ClientMessageIn,
    Event,
    JournalTrouble,
    Shutdown,
    Tick,
    WorkerBad,
    WorkerGone,
    WorkerMessageIn,
)
from vram_conductor.broker.journal.journal import Journal
from vram_conductor.broker.permissions import revoked
from vram_conductor.broker.shell.access import Access
from vram_conductor.broker.shell.auth import Identity
from vram_conductor.broker.shell.logs import Log as LogLine
from vram_conductor.broker.shell.port import Incoming, Port
from vram_conductor.broker.shell.stop import Stop
from vram_conductor.protocol.commands import FromWorker
from vram_conductor.protocol.messages import ClientMessage

MESSAGES_PER_TURN = 64
"""Read from one socket before the other gets its turn."""

POLL_MS_MAX = 1_000
"""The loop turns at least this often."""

LAST_FLUSH_NS = 500_000_000
MS_NS = 1_000_000

M = TypeVar("M")


class CoreLike(Protocol):
    """What the loop needs of ``core.Core``."""

    def handle(self, event: Event, now_ns: int) -> list[Effect]: ...

    def next_deadline_ns(self) -> int | None: ...


Observer = Callable[[Event, list[Effect]], None]
"""Sees every event with its effects (metrics)."""


class Loop:
    """Runs the broker until an Exit effect.

    Args:
        core: decides.
        clients: the clients' ROUTER.
        workers: the workers' ROUTER.
        identity: who clients are; None: their keys say so.
        journal: takes the Append effects.
        stop: tells when to drain.
        log: takes the Log effects.
        drain_ms: how long a drain may take.
        observe: see Observer; None costs nothing.
        access: the keys, where there are any. ``workers_locked``: workers need one, too.
        clock_ns: monotonic time.
    """

    def __init__(
        self,
        core: CoreLike,
        clients: Port[ClientMessage],
        workers: Port[FromWorker],
        identity: Identity | None,
        journal: Journal,
        stop: Stop,
        log: LogLine,
        *,
        drain_ms: int,
        observe: Observer | None = None,
        access: Access | None = None,
        workers_locked: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._clients = clients
        self._workers = workers
        self._identity = identity
        self._journal = journal
        self._stop = stop
        self._log = log
        self._drain_ms = drain_ms
        self._observe = observe
        self._access = access
        self._workers_locked = workers_locked
        self._clock_ns = clock_ns
        self._exit: int | None = None
        self._trouble = ""
        self._dropped_peers = 0
        self._poller = zmq.Poller()
        for port in (clients, workers):
            self._poller.register(port.socket, zmq.POLLIN)
            self._poller.register(port.monitor, zmq.POLLIN)
        for fd in stop.fds:
            self._poller.register(fd, zmq.POLLIN)
        if access is not None:
            self._poller.register(access.socket, zmq.POLLIN)

    def run(self) -> int:
        """Turn until the core says Exit; returns its code."""
        if self._access is not None:
            self._handle(self._access.changed(), self._clock_ns())
        while self._exit is None:
            self._turn()
        self._last_flush()
        return self._exit

    def _turn(self) -> None:
        ready = dict(self._poller.poll(self._timeout_ms()))
        if self._clients.socket in ready:
            self._read(self._clients, self._from_client)
        if self._workers.socket in ready:
            self._read(self._workers, self._from_worker)
        if len(ready) > (self._clients.socket in ready) + (self._workers.socket in ready):
            self._read_rest(ready)
        self._due()

    def _timeout_ms(self) -> int:
        deadlines = (
            self._core.next_deadline_ns(),
            self._journal.next_deadline_ns(),
            self._clients.next_deadline_ns(),
            self._workers.next_deadline_ns(),
            None if self._access is None else self._access.next_deadline_ns(),
        )
        soonest = min((due for due in deadlines if due is not None), default=None)
        if soonest is None:
            return POLL_MS_MAX
        # Rounded up: waking too early would turn the last millisecond into a busy wait.
        wait_ms = (soonest - self._clock_ns() + MS_NS - 1) // MS_NS
        return max(0, min(POLL_MS_MAX, wait_ms))

    # --- events in ----------------------------------------------------------------------------

    def _read(self, port: Port[M], event_of: Callable[[Incoming[M]], Event | None]) -> None:
        for _ in range(MESSAGES_PER_TURN):
            now_ns = self._clock_ns()
            incoming = port.receive(now_ns)
            if incoming is None:
                return
            event = event_of(incoming)
            if event is not None:
                self._handle(event, now_ns)

    def _from_client(self, incoming: Incoming[ClientMessage]) -> Event | None:
        peer, message, _raw, error, rid, user = incoming
        who = self._identity
        if who is None:
            assert self._access is not None
            who = self._access.client(user)
        if who is None:
            self._clients.users.expel(peer, self._clock_ns())
            return ClientBad(peer, revoked(), rid or getattr(message, "rid", b""))
        if message is not None:
            return ClientMessageIn(
                peer, who.principal, who.same_user_ipc, message, who.role, who.key
            )
        return None if error is None else ClientBad(peer, error, rid)

    def _from_worker(self, incoming: Incoming[FromWorker]) -> Event | None:
        peer, message, raw, error, _rid, user = incoming
        devices: tuple[str, ...] = ()
        if self._workers_locked:
            assert self._access is not None
            key = self._access.worker(user)
            if key is None:
                self._workers.users.expel(peer, self._clock_ns())
                return None
            devices = key.devices
        if message is not None:
            return WorkerMessageIn(peer, message, raw, devices, user)
        return None if error is None else WorkerBad(peer, error)

    def _read_rest(self, ready: dict[object, int]) -> None:
        now_ns = self._clock_ns()
        if self._access is not None and self._access.socket in ready:
            self._access.answer()
        for port in (self._clients, self._workers):
            if port.monitor in ready:
                port.read_news(now_ns)
        for fd in self._stop.fds:
            if fd in ready:
                for reason in self._stop.reasons(fd):
                    self._shut_down(reason)
                if fd not in self._stop.fds:
                    self._poller.unregister(fd)

    def _shut_down(self, reason: str) -> None:
        self._log("info", "broker.stopping", why=reason, drain_ms=self._drain_ms)
        self._handle(Shutdown(self._drain_ms), self._clock_ns())

    def _due(self) -> None:
        now_ns = self._clock_ns()
        deadline_ns = self._core.next_deadline_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            self._handle(Tick(), now_ns)
        if self._access is not None and self._access.look(now_ns):
            self._keys_changed(self._access, now_ns)
        for port in (self._clients, self._workers):
            port_ns = port.next_deadline_ns()
            if port_ns is not None and now_ns >= port_ns:
                port.flush(now_ns)
                port.bury(now_ns)
        if self._clients.gone or self._workers.gone:
            self._bury(now_ns)
        for peer, behind in self._clients.take_flow():
            self._handle(ClientFlow(peer, behind), now_ns)
        if self._journal.trouble != self._trouble:
            self._trouble = self._journal.trouble
            self._handle(JournalTrouble(self._trouble), now_ns)
        journal_ns = self._journal.next_deadline_ns()
        if journal_ns is not None and now_ns >= journal_ns:
            self._journal.tick()

    def _keys_changed(self, access: Access, now_ns: int) -> None:
        """Who has no key any more is told so and hung up on."""
        self._handle(access.changed(), now_ns)
        if self._identity is None:
            self._clients.users.expel_strangers(access.client, now_ns)
        if self._workers_locked:
            self._workers.users.expel_strangers(access.worker, now_ns)

    # --- effects out --------------------------------------------------------------------------

    def _handle(self, event: Event, now_ns: int) -> None:
        self._apply(self._core.handle(event, now_ns), event, now_ns)
        if self._clients.gone or self._workers.gone:
            self._bury(now_ns)

    def _apply(self, effects: list[Effect], event: Event, now_ns: int) -> None:
        for effect in effects:
            if isinstance(effect, SendClient):
                self._clients.send(effect.peer, effect.message, now_ns)
            elif isinstance(effect, SendWorker):
                self._workers.send(effect.peer, effect.message, now_ns, effect.raw)
            elif isinstance(effect, Append):
                self._journal.append(effect.record)
            elif isinstance(effect, Log):
                self._log(effect.level, effect.event, **effect.fields)
            else:
                assert isinstance(effect, Exit)
                self._exit = effect.code
        if self._observe is not None:
            self._observe(event, effects)

    def _bury(self, now_ns: int) -> None:
        """Tell the core who is gone; its reaction may find out about more."""
        dropped = self._clients.dropped_peers + self._workers.dropped_peers
        if dropped > self._dropped_peers:
            count, self._dropped_peers = dropped - self._dropped_peers, dropped
            self._log("warning", "broker.peers_dropped", count=count, why="they do not read")
        while self._clients.gone or self._workers.gone:
            if self._clients.gone:
                event: Event = ClientGone(*self._clients.take_gone())
            else:
                event = WorkerGone(*self._workers.take_gone())
            self._apply(self._core.handle(event, now_ns), event, now_ns)

    def _last_flush(self) -> None:
        """Give slow readers a last chance; what the sockets accepted leaves while they linger."""
        give_up_ns = self._clock_ns() + LAST_FLUSH_NS
        for port in (self._clients, self._workers):
            while len(port.outbox) and self._clock_ns() < give_up_ns:
                port.flush(self._clock_ns())
                time.sleep(0.002)
