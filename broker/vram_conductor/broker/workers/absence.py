"""A device without a worker (*pure*): what a person is told of it."""

from __future__ import annotations

from vram_conductor.broker.errors import no_worker_error
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.errors import ErrorInfo


def no_worker(state: State, *devices: str) -> ErrorInfo:
    """``no_worker`` for these devices; of a single one it is said what became of its last worker,
    and when. None given: there is no worker at all."""
    device = state.devices.get(devices[0]) if len(devices) == 1 else None
    return no_worker_error(*devices, last="" if device is None else _last(state, device))


def _last(state: State, device: Device) -> str:
    if device.departure is None or device.link is not None:
        return ""
    ready, ago_s = device.departure.ready, (state.now_ns - device.absent_ns) // MS // 1000
    return f" (its last one, pid {ready.pid} on {ready.host}, was {device.away} {ago_s} s ago)"
