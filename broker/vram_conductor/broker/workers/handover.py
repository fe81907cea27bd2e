"""DRAIN_DEVICE (*pure*): a worker finishes what runs, parks everything and leaves; whoever asked is
told. Jobs and REGISTERs that come meanwhile wait for its successor. One that does not leave in time
is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from vram_conductor.broker.agents.lobby import Who, check_waiters
from vram_conductor.broker.errors import (
    LEFT,
    draining_error,
    given_up_error,
    lost_error,
    overdue_error,
    replaced_error,
)
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import WorkerLink
from vram_conductor.protocol.commands import Drain, WorkerRefused
from vram_conductor.protocol.drain import HOLD_MS, DrainDevice, DrainReceipt
from vram_conductor.protocol.errors import ErrorInfo, NotFound, error_from_info
from vram_conductor.protocol.messages import Error, Ok, Progress

PARK_MS = 120_000
"""How long a worker may take to park everything and leave, once nothing runs."""


@dataclass(slots=True)
class Leaving:
    """A worker that was asked to leave, at ``since_ns``, and is given up at ``until_ns``.
    ``jobs``: numbers of those that it had."""

    since_ns: int
    until_ns: int
    jobs: set[int]
    waiters: dict[Who, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gone:
    """One that has left: what is answered to the same requests again."""

    rids: frozenset[bytes]
    receipt: DrainReceipt


class Handover:
    """The workers that are asked to leave, and the last one of each device that did.

    Args:
        lose: takes the device's worker away, as if it had died.
    """

    def __init__(
        self, state: State, commander: Commander, lose: Callable[[Device, ErrorInfo], None]
    ) -> None:
        self._state = state
        self._commander = commander
        self._lose = lose
        self._leaving: dict[str, Leaving] = {}
        self._gone: dict[str, Gone] = {}

    def drain(self, session: Session, message: DrainDevice) -> None:
        """Ask the device's worker to leave; OK follows when it has, or ERROR.

        Raises NotFound ``no_such_device``, Unavailable ``draining`` or ``no_worker``, Aborted
        ``worker_replaced``, ResourceExhausted ``too_many_waiters``.
        """
        state = self._state
        if state.draining:
            raise error_from_info(draining_error())
        device = self._device(message.device)
        gone = self._gone.get(device.id)
        if gone is not None and message.rid in gone.rids:
            self._ok(session.peer, message.rid, gone.receipt)
            return
        link = device.link
        if link is None:
            raise error_from_info(no_worker(state, device.id))
        if message.worker_epoch not in (None, link.epoch):
            raise error_from_info(replaced_error(device.id, link))
        drain_ms = message.drain_ms
        if drain_ms is None:
            drain_ms = state.config.broker.drain_ms
        until_ns = state.in_ms(drain_ms + PARK_MS)
        leaving = self._leaving.get(device.id)
        if leaving is None:
            leaving = Leaving(state.now_ns, until_ns, set(link.runs))
        check_waiters(f"the end of the worker of {device.id}", len(leaving.waiters))
        self._leaving[device.id] = leaving
        leaving.waiters[session.peer, message.rid] = None
        leaving.until_ns = min(leaving.until_ns, until_ns)
        state.timers.set(("leave", device.id), leaving.until_ns)
        self._ask(device, link, drain_ms, message, session)

    def lost(self, device: Device, error: ErrorInfo) -> None:
        """The device has no worker any more, and every command that it had has been told."""
        leaving = self._leaving.pop(device.id, None)
        if leaving is None:
            return
        self._state.timers.cancel(("leave", device.id))
        if error.reason != LEFT:
            self._fail(leaving, error)
            return
        receipt = self._receipt(device, leaving)
        rids = frozenset(rid for _, rid in leaving.waiters)
        self._gone[device.id] = Gone(rids, receipt)
        for peer, rid in leaving.waiters:
            self._ok(peer, rid, receipt)

    def overdue(self, device: Device) -> None:
        """The device's worker should have left by now. One that still pings would keep its
        successor waiting for ever, so it counts as dead, and is told so."""
        leaving, link = self._leaving.pop(device.id, None), device.link
        if leaving is None or link is None:
            return
        state, ready = self._state, link.ready
        state.log(
            "error",
            "worker_given_up",
            device=device.id,
            pid=ready.pid,
            host=ready.host,
            running=len(link.runs),
            what="it was asked to leave and has not; if it still runs, end it with kill -9",
        )
        self._fail(leaving, overdue_error(device.id, link))
        device.given_up = link.epoch
        if link.connected:
            state.to_worker(link.peer, WorkerRefused(error=given_up_error(device.id)))
        self._lose(device, lost_error(device.id))

    # --- parts --------------------------------------------------------------------------------

    def _device(self, name: str) -> Device:
        device = self._state.devices.get(name)
        if device is None:
            names = sorted(self._state.devices)
            raise NotFound(
                "no_such_device",
                f"there is no device {name!r}; known: {', '.join(names) or 'none'}",
                device=name,
                devices=names,
            )
        return device

    def _ask(
        self,
        device: Device,
        link: WorkerLink,
        drain_ms: int,
        message: DrainDevice,
        session: Session,
    ) -> None:
        state = self._state
        hold_ms = HOLD_MS if message.hold_ms is None else message.hold_ms
        link.draining = True
        device.hold_until_ns = max(device.hold_until_ns, state.in_ms(hold_ms))
        self._commander.send(
            device,
            lambda epoch, op: Drain(broker_epoch=epoch, op=op, drain_ms=drain_ms),
        )
        state.log(
            "info",
            "worker_draining",
            device=device.id,
            pid=link.ready.pid,
            asked_by=session.principal,
            drain_ms=drain_ms,
            hold_ms=hold_ms,
            running=len(link.runs),
        )
        note = f"{len(link.runs)} jobs may go on for up to {drain_ms / 1000:g} s"
        progress = Progress(rid=message.rid, stage="drain", total=len(link.runs), note=note)
        state.to_client(session.peer, progress)

    def _receipt(self, device: Device, leaving: Leaving) -> DrainReceipt:
        assert device.departure is not None
        state, ready = self._state, device.departure.ready
        jobs = [state.jobs.find(number) for number in leaving.jobs]
        ends = [None if job is None else job.terminal for job in jobs if not job or job.terminal]
        cut_off = sum(isinstance(end, Error) and end.error.reason == LEFT for end in ends)
        return DrainReceipt(
            device=device.id,
            worker=ready.worker,
            worker_epoch=ready.worker_epoch,
            pid=ready.pid,
            host=ready.host,
            version=ready.version,
            build=ready.build,
            finished=len(ends) - cut_off,
            cut_off=cut_off,
            waiting=state.queue.waiting(device.id),
            ms=(state.now_ns - leaving.since_ns) // MS,
        )

    def _fail(self, leaving: Leaving, error: ErrorInfo) -> None:
        for peer, rid in leaving.waiters:
            self._state.fail(peer, rid, error)

    def _ok(self, peer: bytes, rid: bytes, receipt: DrainReceipt) -> None:
        self._state.to_client(peer, Ok(rid=rid, body=msgspec.to_builtins(receipt)))
