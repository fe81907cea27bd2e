"""The engine thread's loop: commands in, steps, replies out, reports on what is where."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from vram_conductor.protocol.commands import (
    Command,
    Drain,
    Estimate,
    Failed,
    Load,
    Loaded,
    Ready,
    Residency,
    Unload,
    WorkerBye,
    WorkerOk,
    WorkerWelcome,
)
from vram_conductor.protocol.values import Line
from vram_conductor.worker.core import Core
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.exits import EXIT_OK, EXIT_TEMPORARY, EXIT_UNAVAILABLE
from vram_conductor.worker.farewell import ParkedStates, farewell
from vram_conductor.worker.gauge import Sampler
from vram_conductor.worker.identity import Identity
from vram_conductor.worker.inbound import Arrived, Inbound, ReadyWanted, Refused, SessionLost
from vram_conductor.worker.outbox import Sent
from vram_conductor.worker.reporter import Reporter
from vram_conductor.worker.resolver import Resolver

log = logging.getLogger(__name__)

WAITING_TICK_NS = 50_000_000
"""Jobs that wait for room are looked at again this often though nothing happened."""


@dataclass(frozen=True)
class Stop:
    """Leave: a signal, or the supervisor is gone."""

    why: str


@dataclass(frozen=True)
class Wake:
    """A prompt has been prepared."""


Inbox = queue.SimpleQueue[Inbound | Stop | Wake]


class Outlet(Protocol):
    """Where messages to the broker go; never blocks. ``link.Link`` is it."""

    def send(self, *messages: Sent) -> None: ...


class EngineLoop:
    """Runs the core on the calling thread."""

    def __init__(
        self,
        core: Core,
        store: ParkedStates,
        link: Outlet,
        inbox: Inbox,
        sampler: Sampler,
        resolver: Resolver,
        digester: Digester,
        identity: Identity,
        sample_ms: int,
        drain_ms: int,
        worn: Callable[[], bool] = lambda: False,
    ) -> None:
        """``drain_ms``: how long running jobs may go on after SIGTERM (a broker's DRAIN brings its
        own time). ``worn``: whether this process should be replaced, see ``gauge``."""
        self._core = core
        self._store = store
        self._link = link
        self._inbox = inbox
        self._sampler = sampler
        self._resolver = resolver
        self._digester = digester
        self._identity = identity
        self._reporter = Reporter(sample_ms)
        self._drain_ms = drain_ms
        self._worn = worn
        self._broker_epoch: int | None = None
        self._open = False
        self._loads: dict[tuple[int, int], Path] = {}
        self._unloads: set[tuple[int, int]] = set()
        self._stopping = False
        self._handling = False
        self._ready_wanted = False
        core.outbox.hurry = self._send_replies

    def progress(self) -> tuple[int, bool]:
        """A counter that moves while nothing hangs, and whether something goes on that should end
        soon (a load may take its time). Read by the IO thread."""
        mark, busy = self._core.progress()
        return mark, busy or self._handling

    def run(self) -> int:
        """Serve until told to leave; returns the exit code. Everything is parked then."""
        worked = False
        while True:
            code = self._take_all(block=not worked)
            if code is not None:
                return code
            now_ns = time.monotonic_ns()
            rest = self._ready_wanted or (self._open and self._reporter.overdue(now_ns))
            self._core.rest(rest)
            worked = self._core.step(now_ns) or (rest and not self._core.hauling)
            if self._core.broken:
                log.error("the device computes nothing any more: leaving with %d", EXIT_TEMPORARY)
                return EXIT_TEMPORARY
            self._emit()
            if self._worn():
                return EXIT_TEMPORARY  # every state is parked: no job runs or waits
            if self._core.drained:
                log.info("%s", farewell(self._store))
                self._link.send((WorkerBye(worker_epoch=self._identity.worker_epoch), []))
                return EXIT_OK

    # --- in -----------------------------------------------------------------------------------

    def _take_all(self, *, block: bool) -> int | None:
        """Take what has come in; an exit code ends the loop."""
        if not block and self._inbox.empty():
            return None  # once per token: an exception costs more
        timeout_s = self._timeout_s() if block else 0.0
        while True:
            try:
                item = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            except queue.Empty:
                return None
            timeout_s = 0.0
            code = self._take(item)
            if code is not None:
                return code

    def _timeout_s(self) -> float:
        now_ns = time.monotonic_ns()
        times = [self._core.wake_ns()]
        if self._open and not self._core.hauling:
            core = self._core
            times.append(self._reporter.next_ns(core.revision, now_ns, urgent=core.urgent))
        if len(self._core.jobs):
            times.append(now_ns + WAITING_TICK_NS)
        first = min((at for at in times if at is not None), default=now_ns + 1_000_000_000)
        return max(0, first - now_ns) / 1e9

    def _take(self, item: Inbound | Stop | Wake) -> int | None:
        match item:
            case Arrived(message, raw) if isinstance(message, WorkerWelcome):
                self._welcome(message)
            case Arrived(message, raw) if isinstance(message, Estimate):
                self._reporter.hurry(time.monotonic_ns())  # it is answered elsewhere
            case Arrived(message, raw) if isinstance(message, Command):
                self._command(message, raw)
            case SessionLost():
                self._session_lost()
            case ReadyWanted():
                self._ready_wanted = True
            case Refused(error):
                log.error("the broker refuses this worker: %s: %s", error.reason, error.message)
                return EXIT_TEMPORARY if error.reason == "stale_worker" else EXIT_UNAVAILABLE
            case Stop(why):
                self._stop(why)
            case _:
                pass
        return None

    def _welcome(self, message: WorkerWelcome) -> None:
        self._broker_epoch, self._open = message.broker_epoch, True
        self._reporter.restart()
        self._loads.clear()
        self._unloads.clear()
        self._core.welcome(message, time.monotonic_ns())

    def _command(self, command: Command, raw: list[bytes]) -> None:
        if isinstance(command, Load):
            self._loads[command.broker_epoch, command.op] = Path(command.path)
        if isinstance(command, Drain):
            log.info("leaving: the broker asks for it; what runs has %d ms", command.drain_ms)
        if isinstance(command, Unload):
            self._unloads.add((command.broker_epoch, command.op))
        self._handling = not isinstance(command, Load)
        self._core.handle(command, raw, time.monotonic_ns())
        self._handling = False
        # A load may have taken seconds: its answer must not wait for the next step as well.
        self._emit()

    def _session_lost(self) -> None:
        """Whatever runs, nobody will hear of it: the broker has given these attempts up too."""
        self._open = False
        self._core.lose_session()

    def _stop(self, why: str) -> None:
        if self._stopping:
            log.warning("%s again: cancelling what still runs", why)
            self._core.cancel_all()
            return
        self._stopping = True
        log.info("leaving: %s", why)
        drain = Drain(broker_epoch=self._broker_epoch or 0, op=0, drain_ms=self._drain_ms)
        self._core.handle(drain, [], time.monotonic_ns())

    # --- out ----------------------------------------------------------------------------------

    def _emit(self) -> None:
        if self._ready_wanted and not self._core.hauling:
            self._ready_wanted = False
            self._link.send((self.ready(), []))
        self._send_replies(between_moves=True)
        self._report()

    def _report(self) -> None:
        if (residency := self._residency()) is not None:
            self._link.send((residency, []))

    def _send_replies(self, *, between_moves: bool = False) -> None:
        """What there is to say, at once: what comes next may take a while."""
        messages = [self._with_digest(sent) for sent in self._core.take_outbox()]
        if any(self._answers_unload(message) for message, _ in messages):
            # Whoever hears that it is done may want that memory: whether the device has it back
            # is said first.
            self._reporter.restart()
            if between_moves:
                self._report()
        if messages:
            self._link.send(*messages)

    def _answers_unload(self, message: msgspec.Struct) -> bool:
        if not isinstance(message, WorkerOk | Failed):
            return False
        before = len(self._unloads)
        self._unloads.discard((message.broker_epoch, message.op))
        return len(self._unloads) < before

    def _with_digest(self, sent: Sent) -> Sent:
        """LOADED tells the content digest if it is known; else it is found out from now on."""
        message, raw = sent
        if not isinstance(message, Loaded | Failed):
            return sent
        path = self._loads.pop((message.broker_epoch, message.op), None)
        if path is None or not isinstance(message, Loaded):
            return sent
        digest = message.digest or self._digester.known(path)
        if digest is None and message.weights_bytes is not None:
            self._digester.request(path, self._resolver.expected_sha256(path))
        return msgspec.structs.replace(message, digest=digest), raw

    def _residency(self) -> Residency | None:
        """A report, if one is due. Only called between moves, so the sample sees none half done."""
        core, now_ns = self._core, time.monotonic_ns()
        if not self._open or core.hauling or now_ns < self._reporter.next_ns(core.revision, now_ns):
            return None  # once per token: whether somebody is urgent need not be asked
        if not self._reporter.due(core.revision, now_ns, urgent=core.urgent):
            return None
        assert self._broker_epoch is not None
        report = core.report()
        self._reporter.took(time.monotonic_ns() - now_ns)
        spare = Line("spare", self._store.spare_bytes, detail="given back when room is needed")
        return Residency(
            broker_epoch=self._broker_epoch,
            worker_epoch=self._identity.worker_epoch,
            seq=self._reporter.seq,
            memory=self._sampler.sample(report.own_bytes),
            lines=report.lines,
            host_lines=[*report.host_lines, *([spare] if spare.bytes else [])],
            places=report.places,
            swaps=report.swaps,
            lingered=report.lingered,
            rates=report.rates,
            base_bytes=core.residency.base_bytes,
        )

    def ready(self) -> Ready:
        """READY as of now."""
        core = self._core
        memory = self._sampler.sample(core.report().own_bytes)
        base_bytes = core.residency.base_bytes
        return self._identity.ready(self._sampler.info(), memory, core.adopted(), base_bytes)
