"""Workers that say READY for a device that still has one (*pure*): they wait for the verdict.

A killed worker's replacement must not be sent away, and a worker that was started twice by mistake
must not steal the device. Whether the older one is gone, the next half heartbeats tell.
"""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.broker.errors import stale_error, taken_error
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import Candidate
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import ErrorInfo


class Candidates:
    """At most one per device.

    Args:
        device_of: the device of each worker's connection.
        refuse: sends W_REFUSED.
    """

    def __init__(
        self,
        state: State,
        device_of: dict[bytes, Device],
        refuse: Callable[[bytes, ErrorInfo], None],
    ) -> None:
        self._state = state
        self._device_of = device_of
        self._refuse = refuse

    def hold(self, device: Device, who: Candidate) -> None:
        """``who`` waits; of two, the younger."""
        old, epoch = device.candidate, who.ready.worker_epoch
        if old is not None:
            if epoch < old.ready.worker_epoch:
                self._refuse(who.peer, stale_error(device.id))
                return
            if (old.peer, old.ready.worker_epoch) == (who.peer, epoch):
                return
            if old.peer != who.peer:
                self._refuse(old.peer, stale_error(device.id))
            self.drop(device)
        device.candidate = who
        self._device_of[who.peer] = device
        self.wait(device)

    def wait(self, device: Device) -> None:
        """Set the timer ``candidate``: for as long as silence means death."""
        patience_ms = self._state.config.broker.heartbeat_ms * limits.MISSED_HEARTBEATS_MAX
        self._state.timers.set(("candidate", device.id), self._state.in_ms(patience_ms))

    def judge(self, device: Device) -> None:
        """The device's worker has just spoken. What it sent before it died may still arrive for
        a moment after the candidate's READY; later, the worker is alive. One that is leaving is
        followed by the candidate."""
        candidate = device.candidate
        if candidate is None or not device.ready:
            return
        assert device.link is not None
        grace_ns = self._state.config.broker.heartbeat_ms * MS // 2
        if self._state.now_ns - candidate.since_ns >= grace_ns:
            self.drop(device)
            self._refuse(candidate.peer, taken_error(device.id, device.link))

    def supersede(self, device: Device, who: Candidate) -> None:
        """``who`` gets the device now: another one that waits for it is sent away."""
        waiting = device.candidate
        if waiting is not None and waiting.peer != who.peer:
            self._refuse(waiting.peer, stale_error(device.id))
        self.drop(device)

    def drop(self, device: Device) -> None:
        """It waits no longer, whatever the verdict."""
        candidate, device.candidate = device.candidate, None
        self._state.timers.cancel(("candidate", device.id))
        if candidate is not None:
            self._device_of.pop(candidate.peer, None)
