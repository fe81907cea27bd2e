"""The connection to one worker (*pure*): which commands are open, and what it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.protocol.commands import (
    Copied,
    Estimated,
    Failed,
    Loaded,
    Ready,
    RunDone,
    RunTokens,
    Started,
    WorkerOk,
)
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.liveness import Liveness
from vram_conductor.protocol.values import ConversationKey

ReplyMessage = Estimated | Loaded | WorkerOk | Copied | Started | RunTokens | RunDone | Failed
"""What echoes a command's (broker_epoch, op)."""

OnReply = Callable[[ReplyMessage, list[bytes]], bool]
"""Takes one reply; True if the command is over with it."""

OnLost = Callable[[ErrorInfo], None]
"""The worker is gone, or did not answer in time: no reply will come."""


@dataclass(slots=True)
class OpenOp:
    """A command that waits for replies."""

    what: str
    on_reply: OnReply
    on_lost: OnLost


@dataclass(slots=True)
class WorkerLink:
    """A welcomed worker.

    Attributes:
        ops: open commands; a reply to any other is stale and dropped.
        runs: numbers of the jobs whose attempt it has.
        known: conversations whose transcript it surely has, at this version.
        budget_bytes: the last budget sent.
        steps, busy: its last word on its work loop.
    """

    peer: bytes
    ready: Ready
    liveness: Liveness
    ops: dict[int, OpenOp] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    known: dict[ConversationKey, int] = field(default_factory=dict)
    budget_bytes: int = -1
    steps: int = 0
    busy: bool = False
    draining: bool = False

    @property
    def epoch(self) -> int:
        return self.ready.worker_epoch


@dataclass(slots=True)
class Candidate:
    """A worker that said READY for a device that still has one: it waits for the verdict."""

    peer: bytes
    ready: Ready
    since_ns: int
