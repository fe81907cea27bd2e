"""What the broker says to its workers (SPEC.md, section "Worker messages").

The worker connects out and says READY; from then on the broker commands. Every command carries
``(broker_epoch, op)`` and every reply echoes both with the worker's own epoch; a peer drops what
carries another epoch than the current one, so nothing from a previous life can change a ledger.

Token ids of a transcript travel as one raw little-endian int32 buffer behind the map
(``n_raw`` says how many buffers follow).
"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.protocol.base import Base
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.replies import (
    Copied,
    Estimated,
    Failed,
    FromWorker,
    Loaded,
    Parked,
    Place,
    Ready,
    Reply,
    Residency,
    Resume,
    RunDone,
    RunTokens,
    Started,
    WorkerBye,
    WorkerOk,
    WorkerPing,
)
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    Message,
    PoolShape,
    Sampling,
)

# The replies can be imported from here, too: most users need both directions.
__all__ = [
    "Budget",
    "CancelRun",
    "Command",
    "Copied",
    "Copy",
    "Drain",
    "Estimate",
    "Estimated",
    "Failed",
    "Forget",
    "FromWorker",
    "Load",
    "Loaded",
    "NoSession",
    "Parked",
    "Place",
    "Ready",
    "Reply",
    "Residency",
    "Resume",
    "Resumed",
    "Run",
    "RunDone",
    "RunTokens",
    "Started",
    "ToWorker",
    "Unload",
    "WorkerBye",
    "WorkerOk",
    "WorkerPing",
    "WorkerPong",
    "WorkerRefused",
    "WorkerWelcome",
]


class Command(Base, frozen=True, kw_only=True):
    """A command; ``op`` is unique within ``broker_epoch``, and grows."""

    broker_epoch: int
    op: int


class WorkerWelcome(Base, frozen=True, kw_only=True, tag="W_WELCOME"):
    """Answer to READY. ``conversations`` lists what the broker still knows: every other parked
    state on this worker is an orphan and is deleted. ``resume_ms``: a session that loses its
    connection can be resumed for so long; 0: not at all."""

    v: tuple[int, int]
    broker_epoch: int
    heartbeat_ms: int
    conversations: list[ConversationKey] = []
    resume_ms: int = 0


class Resumed(Base, frozen=True, kw_only=True, tag="W_RESUMED"):
    """Answer to W_RESUME: the session goes on. ``order``: of the last reply or report that has
    arrived; later ones are to be sent again."""

    order: int


class Estimate(Command, frozen=True, kw_only=True, tag="ESTIMATE"):
    """Dry run: what would this model and pool take? Never touches the device's memory.

    Attributes:
        model: name or path as the client gave it.
        shape: the pool to estimate.
        n_ctx: the agent's own context, for the size of its largest state.
        fit_bytes: also find the largest cell count whose pool takes at most this many bytes.
        cap_bytes: a file larger than this is refused at once (stage 0).
        bare_path: whether a path outside the catalogue and allowed folders is acceptable.
    """

    model: str
    shape: PoolShape
    n_ctx: int
    fit_bytes: int | None = None
    cap_bytes: int | None = None
    bare_path: bool = False


class Load(Command, frozen=True, kw_only=True, tag="LOAD"):
    """An admitted agent: load its weights and pool as far as the budget allows.

    ``shape`` is the pool's shape with this agent in it; ``model`` is ModelInfo.model.
    ``path`` is ModelInfo.path. ``budget_bytes`` as in BUDGET. The sizes are estimates.
    ``linger_s`` as in REGISTER.
    """

    agent: AgentKey
    model: str
    path: str
    shape: PoolShape
    n_ctx: int
    state_bytes: int
    weights_bytes: int
    pool_bytes: int
    budget_bytes: int
    scratch_bytes: int = 0
    linger_s: int | None = None


class Unload(Command, frozen=True, kw_only=True, tag="UNLOAD"):
    """Forget an agent and its parked states; ``shape`` is the pool's shape without it, None if
    it was the last one. Idempotent."""

    agent: AgentKey
    shape: PoolShape | None = None
    pool_bytes: int = 0
    budget_bytes: int = 0


class Forget(Command, frozen=True, kw_only=True, tag="FORGET"):
    """Forget one conversation: KV, parked state, cached transcript. Idempotent."""

    conversation: ConversationKey


class Copy(Command, frozen=True, kw_only=True, tag="COPY"):
    """Let a new conversation begin with a copy of the parked state of another, of the same agent,
    if there is one and room for it. Idempotent."""

    source: ConversationKey
    target: ConversationKey


class Budget(Command, frozen=True, kw_only=True, tag="BUDGET"):
    """The worker's budget is now cap - foreign: free what exceeds it, use what is new."""

    budget_bytes: int


class Run(Command, frozen=True, kw_only=True, tag="RUN"):
    """Run one attempt of a job. ``op`` identifies the attempt in all that comes back.

    Attributes:
        version: the conversation's version that the input refers to.
        transcript_tokens: length of the transcript at that version.
        n_raw: 1 if a raw buffer with the whole transcript (int32 LE) follows, else 0: then the
            worker has it, or answers FAILED ``transcript_missing`` and is sent it.
        The other fields are those of DECODE with every default filled in.
    """

    job: int
    conversation: ConversationKey
    version: int
    transcript_tokens: int
    n_raw: int = 0
    continue_: bool = msgspec.field(name="continue", default=False)
    messages: list[Message] | None = None
    prompt: str | None = None
    tokens: list[int] | None = None
    max_tokens: int | None = None
    sampling: Sampling = Sampling()
    stop: list[str] = []
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    logit_bias: list[tuple[int, float]] = []
    timeout_ms: int | None = None
    priority: int = 0

    @property
    def structured(self) -> bool:
        """Whether the output follows a grammar or a schema."""
        return self.grammar is not None or self.json_schema is not None


class CancelRun(Command, frozen=True, kw_only=True, tag="CANCEL_RUN"):
    """Stop the attempt with op ``run_op`` within one step; it still ends in RUN_DONE/FAILED."""

    run_op: int


class Drain(Command, frozen=True, kw_only=True, tag="DRAIN"):
    """Finish or cancel what runs, park everything, then say W_BYE and exit."""

    drain_ms: int


class WorkerPong(Base, frozen=True, kw_only=True, tag="W_PONG"):
    """Answer to W_PING; with ``n`` 0 of the broker's own accord. ``order`` as in W_RESUMED."""

    n: int = 0
    order: int = 0


class NoSession(Base, frozen=True, kw_only=True, tag="W_NO_SESSION"):
    """Broker to worker: I do not know you; say READY."""


class WorkerRefused(Base, frozen=True, kw_only=True, tag="W_REFUSED"):
    """Broker to worker: READY was refused and will be again; exit and say ``error``."""

    error: ErrorInfo


ToWorker = (
    WorkerWelcome
    | Resumed
    | Estimate
    | Load
    | Unload
    | Forget
    | Copy
    | Budget
    | Run
    | CancelRun
    | Drain
    | WorkerPong
    | NoSession
    | WorkerRefused
)
