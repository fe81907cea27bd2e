"""The workers' comings and goings (*pure*): READY, who may serve a device, loss.

One worker serves a device. When a second one says READY, the younger wins if the older is gone; see
``candidates``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from vram_conductor.broker.errors import LEFT, left_error, lost_error, taken_error
from vram_conductor.broker.events import WorkerMessageIn
from vram_conductor.broker.journal.records import WorkerEpochSeen
from vram_conductor.broker.permissions import device_denied
from vram_conductor.broker.state import Level, State
from vram_conductor.broker.workers.candidates import Candidates
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.holding import Holding
from vram_conductor.broker.workers.links import Candidate, WorkerLink
from vram_conductor.broker.workers.welcome import log_ready, refusal, welcome_message
from vram_conductor.protocol.commands import (
    FromWorker,
    NoSession,
    Ready,
    Residency,
    Resume,
    WorkerBye,
    WorkerPing,
    WorkerPong,
    WorkerRefused,
)
from vram_conductor.protocol.errors import ConductorError, ErrorInfo
from vram_conductor.protocol.liveness import Liveness


@dataclass(frozen=True)
class WorkerHooks:
    """What the rest of the broker does about it.

    ``welcomed`` comes after the link is in place, ``lost`` after it is gone and every open
    command has been told, ``residency`` with each accepted report.
    """

    welcomed: Callable[[Device, Ready], None]
    lost: Callable[[Device, ErrorInfo], None]
    residency: Callable[[Device, Residency], None]


class Workers:
    """Decides who is a device's worker."""

    def __init__(
        self,
        state: State,
        commander: Commander,
        find_device: Callable[[Ready], Device | None],
        hooks: WorkerHooks,
    ) -> None:
        self._state = state
        self._commander = commander
        self._find_device = find_device
        self._hooks = hooks
        self._holding = Holding(state)
        self._device_of: dict[bytes, Device] = {}
        self._candidates = Candidates(state, self._device_of, self._refuse)

    def message(self, event: WorkerMessageIn) -> None:
        """One message of a worker."""
        peer, message = event.peer, event.message
        if isinstance(message, Ready):
            error = device_denied(event.devices, message.device.device)
            if error is None:
                self._ready(Candidate(peer, message, self._state.now_ns, event.key))
            else:
                self._refuse(peer, error)
            return
        if isinstance(message, Resume):
            self._resume(peer, message, event.key)
            return
        device = self._device_of.get(peer)
        link = device.link if device is not None else None
        if device is None or link is None or link.peer != peer:
            self._stranger(peer, message)
            return
        link.liveness.heard(self._state.now_ns)
        if link.away_ns is not None:
            self._holding.heard(device, link)
            self._watch(device, link)
        self._candidates.judge(device)
        if not self._holding.takes(link, message):
            return
        match message:
            case WorkerPing():
                link.steps, link.busy = message.steps, message.busy
                self._state.to_worker(peer, self._holding.pong(link, message.n))
            case Residency():
                if self._is_current(device, link, message):
                    self._hooks.residency(device, message)
            case WorkerBye():
                if message.worker_epoch == link.epoch:
                    self.lose(device, left_error(device.id))
            case _:
                self._commander.reply(device, message, event.raw)

    def revoke(self, keys: Container[str]) -> None:
        """Only these keys count from now on. A worker without one is not waited for."""
        for device in self._state.devices.values():
            waiting, link = device.candidate, device.link
            if waiting is not None and waiting.key and waiting.key not in keys:
                self._candidates.drop(device)
            if link is not None and link.key and link.key not in keys:
                self.lose(device, lost_error(device.id))

    def gone(self, peer: bytes, *, dead: bool = False) -> None:
        """The transport says that the peer is gone; ``dead``: its process has ended."""
        device = self._device_of.get(peer)
        if device is None:
            return
        if device.candidate is not None and device.candidate.peer == peer:
            self._candidates.drop(device)
        if device.link is None or device.link.peer != peer:
            return
        if not dead and device.candidate is None and self._holding.hold(device, connected=False):
            self._device_of.pop(peer)
        else:
            self.lose(device, lost_error(device.id))

    def bad(self, peer: bytes, error: ConductorError) -> None:
        """Frames that cannot be read. A worker of another protocol is told so."""
        self._state.log("error", "bad_worker_message", reason=error.reason)
        if error.reason == "unsupported_version":
            self._refuse(peer, error.info)

    def check_alive(self, device: Device) -> None:
        """The timer of the device's worker."""
        link = device.link
        if link is None:
            return
        if link.away_ns is not None:
            if self._holding.over(link):
                self.lose(device, lost_error(device.id))
        elif not link.liveness.dead(self._state.now_ns):
            self._watch(device, link)
        elif not self._holding.hold(device, connected=True):
            self.lose(device, lost_error(device.id))

    def lose(self, device: Device, error: ErrorInfo) -> None:
        """The device has no worker from now on: nothing that it was asked will be answered."""
        link = device.link
        assert link is not None
        state = self._state
        device.forget_worker(state.now_ns, left=error.reason == LEFT)
        device.ledger.forget_sample()
        self._device_of.pop(link.peer, None)
        state.timers.cancel(("worker", device.id))
        state.timers.set(("absent", device.id), device.patient_until_ns)
        level: Level = "info" if error.reason == LEFT else "warning"
        state.log(level, "worker_lost", device=device.id, reason=error.reason)
        self._commander.lose(device, link, error)
        self._hooks.lost(device, error)
        candidate = device.candidate
        if candidate is not None and not state.draining:
            self._candidates.drop(device)
            self._welcome(device, candidate)

    def candidate_due(self, device: Device) -> None:
        """A candidate has waited for as long as silence means death: it gets the device."""
        candidate = device.candidate
        if candidate is None or self._state.draining:
            return
        if device.link is not None and device.link.draining:
            self._candidates.wait(device)
        elif device.link is not None:
            self.lose(device, lost_error(device.id))
        else:
            self._candidates.drop(device)
            self._welcome(device, candidate)

    # --- READY --------------------------------------------------------------------------------

    def _ready(self, who: Candidate) -> None:
        if self._state.draining:
            return
        peer, ready = who.peer, who.ready
        device = self._find_device(ready)
        error = refusal(self._state.config, device, ready)
        if device is None or error is not None:
            assert error is not None
            self._refuse(peer, error)
            return
        self._state.devices.setdefault(device.id, device)
        self._leave_other_device(peer, device)
        link = device.link
        if link is None and ready.worker_epoch >= device.epoch:
            self._candidates.supersede(device, who)
            self._welcome(device, who)
        elif link is None:
            # Perhaps a zombie, perhaps a clock that was set back: a younger one would speak up.
            self._candidates.hold(device, who)
        elif ready.worker_epoch == link.epoch and who.key == link.key:
            self._reconnected(device, link, who)
        elif ready.worker_epoch <= link.epoch and not link.draining:
            self._refuse(peer, taken_error(device.id, link))
        elif not link.connected and ready.host == link.ready.host:
            # Its parked states have one owner at a time: the older one has ended.
            self._candidates.supersede(device, who)
            self.lose(device, lost_error(device.id))
            self._welcome(device, who)
        else:
            self._candidates.hold(device, who)
            if link.connected:
                # If the older one is dead, sending to it makes the transport say so.
                self._state.to_worker(link.peer, WorkerPong())

    def _resume(self, peer: bytes, message: Resume, key: str) -> None:
        """A worker over a new connection: its session goes on if it is held."""
        device = self._state.devices.get(message.device)
        link = None if device is None else device.link
        if device is None or link is None or not self._holding.knows(link, message, key):
            self._state.to_worker(peer, NoSession())
            return
        self._leave_other_device(peer, device)
        self._device_of.pop(link.peer, None)
        self._device_of[peer] = device
        link.liveness.heard(self._state.now_ns)
        self._holding.go_on(device, link, peer, message.op)
        self._watch(device, link)

    def _reconnected(self, device: Device, link: WorkerLink, who: Candidate) -> None:
        """The same process again: whatever was under way between us may be lost."""
        runs = [op for op, open_op in link.ops.items() if open_op.what == "Run"]
        if device.candidate is not None and device.candidate.ready.worker_epoch > link.epoch:
            self._refuse(device.candidate.peer, taken_error(device.id, link))
        self._candidates.drop(device)
        self.lose(device, lost_error(device.id))
        self._welcome(device, who)
        for op in runs:
            self._commander.cancel_run(device, op)

    def _welcome(self, device: Device, who: Candidate) -> None:
        state, peer, ready = self._state, who.peer, who.ready
        heartbeat_ms = state.config.broker.heartbeat_ms
        link = WorkerLink(peer, ready, Liveness(state.now_ns, heartbeat_ms, pings=False))
        link.key, link.resume_ms = who.key, self._holding.resume_ms(ready)
        device.link, device.hold_until_ns = link, 0
        self._device_of[peer] = device
        state.timers.cancel(("absent", device.id))
        self._watch(device, link)
        if ready.worker_epoch != device.epoch:
            device.epoch = ready.worker_epoch
            state.append(WorkerEpochSeen(device=device.id, worker_epoch=ready.worker_epoch))
        state.to_worker(peer, welcome_message(state, device))
        log_ready(state, device, ready)
        self._hooks.welcomed(device, ready)

    # --- parts --------------------------------------------------------------------------------

    def _stranger(self, peer: bytes, message: FromWorker) -> None:
        device = self._device_of.get(peer)
        held = device is not None and device.candidate is not None
        if not held and not isinstance(message, WorkerBye):
            self._state.to_worker(peer, NoSession())

    def _is_current(self, device: Device, link: WorkerLink, report: Residency) -> bool:
        """Whether a report is of this life and newer than the one held."""
        held = device.residency
        return (
            report.broker_epoch == self._state.broker_epoch
            and report.worker_epoch == link.epoch
            and (held is None or report.seq > held.seq)
        )

    def _watch(self, device: Device, link: WorkerLink) -> None:
        self._state.timers.set(("worker", device.id), link.liveness.next_ns())

    def _leave_other_device(self, peer: bytes, device: Device) -> None:
        """A connection that now speaks for another device does not serve the old one."""
        old = self._device_of.get(peer)
        if old is None or old is device:
            return
        self.gone(peer)
        self._device_of.pop(peer, None)

    def _refuse(self, peer: bytes, error: ErrorInfo) -> None:
        self._state.log("warning", "worker_refused", reason=error.reason, **error.details)
        self._state.to_worker(peer, WorkerRefused(error=error))
