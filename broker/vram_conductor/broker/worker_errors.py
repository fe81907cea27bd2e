"""What goes wrong with workers, in words (*pure*)."""

from __future__ import annotations

from vram_conductor.broker.links import WorkerLink
from vram_conductor.protocol.errors import Code, ErrorInfo

LEFT = "worker_left"
"""Reason of a loss that was no accident."""


def no_worker_error(device: str) -> ErrorInfo:
    """The device has no worker, or has been without one for too long."""
    return ErrorInfo(
        Code.UNAVAILABLE,
        "no_worker",
        f"device {device!r} has no worker now; start it with `conductor up` or "
        f"`conductor worker --device {device}`, then try again",
        retryable=True,
        retry_after_ms=2_000,
        details={"device": device},
    )


def lost_error(device: str) -> ErrorInfo:
    """The worker died, hangs, or cannot be reached."""
    return ErrorInfo(
        Code.UNAVAILABLE,
        "worker_lost",
        f"the worker of {device} was lost; it is being restarted: send the request again",
        retryable=True,
        retry_after_ms=2_000,
        details={"device": device},
    )


def left_error(device: str) -> ErrorInfo:
    """The worker said W_BYE."""
    return ErrorInfo(
        Code.UNAVAILABLE,
        LEFT,
        f"the worker of {device} was stopped; send the request again when it is back",
        retryable=True,
        retry_after_ms=2_000,
        details={"device": device},
    )


def taken_error(device: str, link: WorkerLink) -> ErrorInfo:
    """Another worker serves the device."""
    return ErrorInfo(
        Code.ALREADY_EXISTS,
        "device_taken",
        f"device {device} is served by {link.ready.worker} (pid {link.ready.pid} on "
        f"{link.ready.host}); stop that one first",
        details={"device": device, "pid": link.ready.pid, "host": link.ready.host},
    )


def stale_error(device: str) -> ErrorInfo:
    """A younger worker wants the device."""
    return ErrorInfo(
        Code.ABORTED,
        "stale_worker",
        f"a younger worker has said READY for {device}; this one must exit",
        details={"device": device},
    )
