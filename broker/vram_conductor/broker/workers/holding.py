"""Workers' sessions that outlive their connections (*pure*).

While a worker's connection is lost, or the worker silent, its link stays: what it was asked stays
open, commands are kept, and nothing is lost on either side when it says W_RESUME in time.
"""

from __future__ import annotations

from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import WorkerLink
from vram_conductor.protocol import resume
from vram_conductor.protocol.commands import (
    FromWorker,
    Ready,
    Reply,
    Residency,
    Resume,
    Resumed,
    WorkerPing,
    WorkerPong,
)

TELL_EVERY = 256
"""The worker is told so often, in messages, how far they have come: it keeps what it is not told
of. Beside that, each of its pings is an occasion."""


class Holding:
    """Decides whether a session can go on, and brings both ends to the same point."""

    def __init__(self, state: State) -> None:
        self._state = state

    def resume_ms(self, ready: Ready) -> int:
        """How long a session with this worker is held; 0: not at all."""
        if resume.FEATURE not in ready.features:
            return 0
        return self._state.config.broker.resume_ms

    def hold(self, device: Device, *, connected: bool) -> bool:
        """The worker is away: its connection was closed or (``connected``) it is silent. Whether
        it is waited for; the timer of the device's worker then says for how long."""
        link = device.link
        assert link is not None
        if not link.resume_ms:
            return False
        link.connected = link.connected and connected
        if link.away_ns is None:
            link.away_ns = self._state.now_ns
            until_ns = self._state.in_ms(link.resume_ms)
            self._state.timers.set(("worker", device.id), until_ns)
            self._state.log(
                "warning", "worker_away", device=device.id, silent=connected, jobs=len(link.runs)
            )
        return True

    def over(self, link: WorkerLink) -> bool:
        """Whether the worker has been away for too long."""
        until_ns = link.away_until_ns
        return until_ns is not None and self._state.now_ns >= until_ns

    def heard(self, device: Device, link: WorkerLink) -> None:
        """The worker has spoken."""
        if link.away_ns is None:
            return
        away_ms = (self._state.now_ns - link.away_ns) // MS
        link.away_ns = None
        self._state.dispatch_due.add(device.id)
        self._state.log("info", "worker_back", device=device.id, away_ms=away_ms)

    def takes(self, link: WorkerLink, message: FromWorker) -> bool:
        """Whether a message is new: what had arrived before a cut comes again after it."""
        if isinstance(message, WorkerPing):
            link.unconfirmed.confirm(message.op)
        if not isinstance(message, Reply | Residency):
            return True
        if message.order:
            if message.order <= link.order:
                return False
            link.order = message.order
        if isinstance(message, Reply):
            # Commands arrive in order: those before the one that is answered are there, too. (Also
            # where a worker does not number its replies: nothing is kept for ever.)
            link.unconfirmed.confirm(message.op)
        if link.order - link.told >= TELL_EVERY:
            self._state.to_worker(link.peer, self.pong(link, 0))
        return True

    def pong(self, link: WorkerLink, n: int) -> WorkerPong:
        """W_PONG; counts as sent."""
        link.told = link.order
        return WorkerPong(n=n, order=link.order)

    def knows(self, link: WorkerLink | None, message: Resume, key: str) -> bool:
        """Whether the session is this one, and the worker the same."""
        return (
            link is not None
            and link.resume_ms > 0
            and link.key == key
            and message.worker_epoch == link.epoch
            and message.broker_epoch == self._state.broker_epoch
        )

    def go_on(self, device: Device, link: WorkerLink, peer: bytes, op: int) -> None:
        """The worker is back as ``peer``; ``op`` is the last command that it has."""
        self.heard(device, link)
        link.peer, link.connected = peer, True
        link.unconfirmed.confirm(op)
        link.told = link.order
        self._state.to_worker(peer, Resumed(order=link.order))
        for command, raw in link.unconfirmed.rest():
            self._state.to_worker(peer, command, raw)
