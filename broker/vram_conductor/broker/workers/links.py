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
    ToWorker,
    WorkerOk,
)
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.liveness import Liveness
from vram_conductor.protocol.resume import Unconfirmed
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
        stopped: conversations whose attempt was stopped before it began, and is not answered yet.
        budget_bytes: the last budget sent.
        steps, busy: its last word on its work loop.
        key: the public half of its key; empty where it needs none.
        resume_ms: how long the session is held when the connection is lost; 0: not at all.
        away_ns: since when the worker is waited for; None while it is there.
        connected: whether ``peer`` is a connection, as far as is known.
        unconfirmed: commands that may not have arrived, by ``op``; kept where they may be sent
            again.
        order: of the last numbered message of the worker. ``told``: the last that it was told.
    """

    peer: bytes
    ready: Ready
    liveness: Liveness
    ops: dict[int, OpenOp] = field(default_factory=dict)
    runs: set[int] = field(default_factory=set)
    known: dict[ConversationKey, int] = field(default_factory=dict)
    stopped: set[ConversationKey] = field(default_factory=set)
    budget_bytes: int = -1
    steps: int = 0
    busy: bool = False
    draining: bool = False
    key: str = ""
    resume_ms: int = 0
    away_ns: int | None = None
    connected: bool = True
    unconfirmed: Unconfirmed[tuple[ToWorker, list[bytes]]] = field(default_factory=Unconfirmed)
    order: int = 0
    told: int = 0

    @property
    def epoch(self) -> int:
        return self.ready.worker_epoch

    @property
    def away_until_ns(self) -> int | None:
        """Until when a worker that is away is waited for; None: it is there."""
        return None if self.away_ns is None else self.away_ns + self.resume_ms * 1_000_000


@dataclass(slots=True)
class Candidate:
    """A worker that says READY. Where the device still has one, it waits for the verdict."""

    peer: bytes
    ready: Ready
    since_ns: int
    key: str = ""
