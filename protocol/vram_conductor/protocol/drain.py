"""Replacing a device's worker while clients wait: DRAIN_DEVICE and its answer. *Pure.*

``commands.Drain`` is what the broker then tells the worker.
"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.base import Base
from vram_conductor.protocol.check import check_name, check_range, check_rid

HOLD_MS = 120_000
"""Default of ``hold_ms``: long enough to install something and to start a worker."""


class DrainDevice(Base, frozen=True, kw_only=True, tag="DRAIN_DEVICE"):
    """Let a device's worker finish what runs, park everything and leave. An admin's to ask.

    Attributes:
        device: whose worker.
        worker_epoch: of the worker that is meant; None: the one that serves. Repeated after it has
            left, the request must not send its successor away.
        drain_ms: how long what runs may go on; None: the broker's ``drain_ms``.
        hold_ms: requests wait for the next worker until so long after this one; not less than they
            wait for any other that is away.
    """

    rid: bytes
    device: str
    worker_epoch: int | None = None
    drain_ms: int | None = None
    hold_ms: int | None = None


class DrainReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has left: what became of the jobs that it had.

    Attributes:
        worker, worker_epoch, pid, host, version, build: of the worker, as in READY.
        finished: jobs that it ended.
        cut_off: jobs whose answer had begun and was not over in time; they ended with
            ``worker_left``, and their tokens are kept.
        waiting: jobs of the device that wait for the next worker.
        ms: how long it took.
    """

    device: str
    worker: str
    worker_epoch: int
    pid: int
    host: str
    version: str
    build: str
    finished: int = 0
    cut_off: int = 0
    waiting: int = 0
    ms: int = 0


def check_drain(message: DrainDevice) -> None:
    """The device's name and the times.

    Raises:
        InvalidArgument: ``bad_rid``, ``bad_name``, ``bad_value``.
        OutOfRange: ``limit_exceeded``.
    """
    check_rid(message.rid)
    check_name("device", message.device)
    for field, value, most in (
        ("worker_epoch", message.worker_epoch, limits.VERSION_MAX),
        ("drain_ms", message.drain_ms, limits.TIME_MS_MAX),
        ("hold_ms", message.hold_ms, limits.TIME_MS_MAX),
    ):
        if value is not None:
            check_range(field, value, 0, most)
