"""What goes wrong, in words (*pure*): the errors of the core."""

from __future__ import annotations

import msgspec

from vram_conductor.broker.journal.restored import ID_BYTES
from vram_conductor.broker.workers.links import ReplyMessage, WorkerLink
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.values import AgentKey

CANCELLED = "cancelled"

LEFT = "worker_left"
"""Reason of a loss that was no accident."""

DRAINING = "draining"
"""Reason of what a broker that is shutting down refuses, or cuts off."""

LEAVING = "worker_draining"
"""The worker's reason for not doing, or not finishing, what it was asked."""


def no_worker_error(*devices: str, last: str = "") -> ErrorInfo:
    """The devices have no worker, or have been without one for too long. None given: there is no
    worker at all. ``last``: what became of the last one."""
    if len(devices) == 1:
        what, how = f"device {devices[0]!r} has no worker now", f" --device {devices[0]}"
    else:
        names = f" ({', '.join(devices)})" if devices else ""
        what, how = f"no device{names} has a worker now", " --device …"
    return ErrorInfo(
        Code.UNAVAILABLE,
        "no_worker",
        f"{what}{last}: if `conductor up` runs, its terminal or log says why; else start it, or "
        f"`conductor worker{how}`; then try again",
        retryable=True,
        retry_after_ms=2_000,
        details={"device": ", ".join(devices)},
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


def cut_off_error(error: ErrorInfo, tokens: int, attempts: int) -> ErrorInfo:
    """``error``, of a lost worker, as the end of a job that had generated ``tokens``."""
    details = {**error.details, "generated_tokens": tokens, "attempts": attempts}
    if not tokens:
        return msgspec.structs.replace(error, details=details)
    what = "was stopped" if error.reason == LEFT else "was lost"
    worker = f"the worker of {error.details.get('device', 'the device')}"
    message = f"{worker} {what} in the middle of the answer; {_kept(tokens)}"
    return msgspec.structs.replace(error, message=message, details=details)


def _kept(tokens: int) -> str:
    return (
        f"its {tokens} tokens stay in the conversation, and so does your message "
        "(usage.state_version): continue from there; the same request again would be answered a "
        "second time, after them"
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


def given_up_error(device: str) -> ErrorInfo:
    """What a worker is told that has not left in time."""
    return ErrorInfo(
        Code.ABORTED,
        "stale_worker",
        f"this worker of {device} was asked to leave and did not in time: it was given up and "
        "must exit",
        details={"device": device},
    )


def overdue_error(device: str, link: WorkerLink) -> ErrorInfo:
    """The worker was to leave, and has not in time."""
    pid, host = link.ready.pid, link.ready.host
    return ErrorInfo(
        Code.DEADLINE_EXCEEDED,
        "worker_timeout",
        f"the worker of {device} (pid {pid} on {host}) did not leave in time and was given up: "
        "what waits is for the next one; if that process still runs, it keeps its memory and the "
        f"parked states: see its log, then end it (kill -9 {pid})",
        retryable=True,
        details={"device": device, "pid": pid, "host": host},
    )


def replaced_error(device: str, link: WorkerLink) -> ErrorInfo:
    """Another worker serves the device than the one that was to leave."""
    ready = link.ready
    return ErrorInfo(
        Code.ABORTED,
        "worker_replaced",
        f"the worker of {device} that was meant has left already; {ready.worker} (pid {ready.pid}, "
        f"version {ready.version}, build {ready.build}) serves it now: look at `conductor status`",
        details={"device": device, "pid": ready.pid, "worker_epoch": ready.worker_epoch},
    )


def version_error(conversation: str, expected: int, version: int) -> ErrorInfo:
    """The conversation is not what the client takes it for."""
    return ErrorInfo(
        Code.ABORTED,
        "version_mismatch",
        f"conversation {conversation!r} has version {version}, not {expected}: somebody (or an "
        "earlier try of yours) changed it; look, then resend",
        details={"expected": expected, "version": version},
    )


def draining_error(tokens: int = 0) -> ErrorInfo:
    """The broker is leaving. ``tokens``: what a job that it cuts off had generated."""
    what = "the broker is shutting down"
    again = f"{what}; send the request again when it is back"
    return ErrorInfo(
        Code.UNAVAILABLE,
        DRAINING,
        f"{what} in the middle of the answer; {_kept(tokens)}" if tokens else again,
        retryable=True,
        retry_after_ms=2_000,
        details={"generated_tokens": tokens} if tokens else {},
    )


def unconfigured_error(device: str) -> ErrorInfo:
    """An agent of the journal lives on a device that the configuration does not have any more."""
    return ErrorInfo(
        Code.FAILED_PRECONDITION,
        "device_not_configured",
        f"the agent lives on {device!r}, which is not configured any more: add the [[device]] "
        "table again, or unregister the agent and register it again",
        details={"device": device},
    )


def gone_error(agent: AgentKey, why: str) -> ErrorInfo:
    """What the jobs of a removed agent end with."""
    return ErrorInfo(
        Code.CANCELLED,
        "agent_removed",
        f"agent {agent.agent!r} was unregistered: {why}",
        details={"agent": agent.agent},
    )


def cancelled_error() -> ErrorInfo:
    """The client asked for it."""
    return ErrorInfo(Code.CANCELLED, CANCELLED, "cancelled as asked")


def timeout_error() -> ErrorInfo:
    """``timeout_ms`` is over."""
    return ErrorInfo(
        Code.DEADLINE_EXCEEDED,
        "timeout",
        "the job was not finished within timeout_ms; what it generated stays in the conversation",
    )


def client_gone_error() -> ErrorInfo:
    return ErrorInfo(
        Code.CANCELLED,
        "client_gone",
        "the client that asked went away before the job was over; send it again",
        retryable=True,
    )


def orphaned_error() -> ErrorInfo:
    return ErrorInfo(Code.CANCELLED, "orphaned", "nobody came back for the job in time")


def queue_timeout_error() -> ErrorInfo:
    """``queue_ms`` is over."""
    return ErrorInfo(
        Code.DEADLINE_EXCEEDED,
        "queue_timeout",
        "the job was not started within queue_ms; nothing was changed; try again later",
        retryable=True,
    )


def transcript_error(tokens: int) -> ErrorInfo:
    """A worker could not be sent the conversation any more."""
    limit = limits.FRAME_BYTES_MAX // ID_BYTES
    return ErrorInfo(
        Code.OUT_OF_RANGE,
        "transcript_too_long",
        f"the conversation has {tokens} tokens, the limit is {limit}: reset it or use another",
        details={"tokens": tokens, "limit": limit},
    )


def bad_reply_error(device: str, message: ReplyMessage) -> ErrorInfo:
    """The worker answered with the wrong type of message."""
    return ErrorInfo(
        Code.INTERNAL,
        "bad_worker_reply",
        f"the worker of {device} answered with {type(message).__name__}; "
        "are broker and worker of one version?",
        details={"device": device},
    )
