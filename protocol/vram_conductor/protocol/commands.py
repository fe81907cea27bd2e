"""Messages between the broker and its workers (SPEC.md, section "Worker messages").

The worker connects out and says READY; from then on the broker commands. Every command carries
``(broker_epoch, op)`` and every reply echoes both with the worker's own epoch; a peer drops what
carries another epoch than the current one, so nothing from a previous life can change a ledger.

Token ids of a transcript travel as one raw little-endian int32 buffer behind the map
(``n_raw`` says how many buffers follow).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.messages import Base
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    DeviceInfo,
    Line,
    Memory,
    Message,
    ModelInfo,
    PoolShape,
    Sampling,
    Usage,
)

# --- broker to worker -------------------------------------------------------------------------


class Command(Base, frozen=True, kw_only=True):
    """A command; ``op`` is unique within ``broker_epoch``."""

    broker_epoch: int
    op: int


class WorkerWelcome(Base, frozen=True, kw_only=True, tag="W_WELCOME"):
    """Answer to READY. ``conversations`` lists what the broker still knows: every other parked
    state on this worker is an orphan and is deleted."""

    v: tuple[int, int]
    broker_epoch: int
    heartbeat_ms: int
    conversations: list[ConversationKey] = []


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
    ``path`` is ModelInfo.path. ``budget_bytes`` as in BUDGET.
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
    logit_bias: list[tuple[int, float]] = []
    timeout_ms: int | None = None
    priority: int = 0


class CancelRun(Command, frozen=True, kw_only=True, tag="CANCEL_RUN"):
    """Stop the attempt with op ``run_op`` within one step; it still ends in RUN_DONE/FAILED."""

    run_op: int


class Drain(Command, frozen=True, kw_only=True, tag="DRAIN"):
    """Finish or cancel what runs, park everything, then say W_BYE and exit."""

    drain_ms: int


class WorkerPong(Base, frozen=True, kw_only=True, tag="W_PONG"):
    n: int = 0


# --- worker to broker -------------------------------------------------------------------------


class Parked(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A parked state found in an arena at start-up."""

    conversation: ConversationKey
    model: str
    n_tokens: int
    bytes: int


class Ready(Base, frozen=True, kw_only=True, tag="READY"):
    """A worker's first message (and again whenever the broker answers ``no_session``).

    Attributes:
        worker: stable name (device and host).
        worker_epoch: nanoseconds of its start: larger is younger.
        build: llama.cpp library build, part of a parked state's identity.
        base_bytes: what the process itself takes on the device (CUDA context).
        mechanism: ``state-swap`` or ``vmm-sleep``; ``mechanism_note`` says why.
        parked: states adopted from a previous life.
        host_total_bytes: arena capacity (shared memory) on the worker's host.
    """

    v: tuple[int, int]
    worker: str
    worker_epoch: int
    pid: int
    host: str
    version: str
    build: str
    device: DeviceInfo
    memory: Memory
    base_bytes: int = 0
    mechanism: str = "state-swap"
    mechanism_note: str = ""
    parked: list[Parked] = []
    host_total_bytes: int = 0


class Reply(Base, frozen=True, kw_only=True):
    """Echo of a command's identity."""

    broker_epoch: int
    op: int
    worker_epoch: int


class Estimated(Reply, frozen=True, kw_only=True, tag="ESTIMATED"):
    """Result of ESTIMATE.

    Attributes:
        weights_bytes, pool_bytes: on the device; the pool is KV + compute (+ recurrent).
        kv_bytes, compute_bytes, recurrent_bytes: the pool's parts.
        state_bytes: largest size of one sequence's parked state at ``n_ctx``.
        fit_cells: answer to ``fit_bytes``; 0 if not even the smallest pool fits.
        cached: the estimate came from the cache.
        ms: how long it took.
    """

    model: ModelInfo
    shape: PoolShape
    weights_bytes: int
    pool_bytes: int
    kv_bytes: int
    compute_bytes: int
    recurrent_bytes: int = 0
    state_bytes: int = 0
    fit_cells: int | None = None
    cached: bool = False
    ms: float = 0.0


class Loaded(Reply, frozen=True, kw_only=True, tag="LOADED"):
    """Result of LOAD. A None size was not allocated yet (``unmeasured``)."""

    weights_bytes: int | None = None
    pool_bytes: int | None = None
    scratch_bytes: int | None = None
    digest: str | None = None
    ms: float = 0.0


class WorkerOk(Reply, frozen=True, kw_only=True, tag="W_OK"):
    """UNLOAD, FORGET, BUDGET or DRAIN is done."""


class Started(Reply, frozen=True, kw_only=True, tag="STARTED"):
    """The prompt is known: the conversation's transcript, if this attempt commits, becomes
    ``transcript[:keep] + raw buffer (the new prompt's ids) + generated ids``."""

    job: int
    keep: int
    n_raw: int = 1
    prompt_tokens: int = 0


class RunTokens(Reply, frozen=True, kw_only=True, tag="RUN_TOKENS"):
    """Output of an attempt. ``ids`` may come without ``text`` (an unfinished character)."""

    job: int
    text: str
    ids: list[int] = []


class RunDone(Reply, frozen=True, kw_only=True, tag="RUN_DONE"):
    """The attempt ended; ``where`` tells where its KV is now."""

    job: int
    usage: Usage
    where: Literal["slot", "parked", "absent"] = "slot"
    parked_bytes: int = 0


class Failed(Reply, frozen=True, kw_only=True, tag="FAILED"):
    """A command failed. For RUN: ``job`` > 0 and ``usage`` tells what was done before."""

    error: ErrorInfo
    job: int = 0
    usage: Usage | None = None


class Place(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where one conversation's KV is."""

    conversation: ConversationKey
    where: Literal["slot", "parked", "absent"]
    n_tokens: int = 0
    parked_bytes: int = 0


class Residency(Base, frozen=True, kw_only=True, tag="RESIDENCY"):
    """What is really on the device; sent when it changes and on a timer.

    ``lines`` hold the same keys as the ledger (``base``, ``weights:…``, ``pool:…``,
    ``scratch:…``); ``host_lines`` the arenas (``parked:<conversation>``).
    """

    broker_epoch: int
    worker_epoch: int
    seq: int
    memory: Memory
    lines: list[Line] = []
    host_lines: list[Line] = []
    places: list[Place] = []
    swaps: int = 0


class WorkerPing(Base, frozen=True, kw_only=True, tag="W_PING"):
    """``steps`` counts engine steps, ``busy`` says whether it should be counting: together they
    tell a hung device from a busy one and from an idle one."""

    n: int
    steps: int
    busy: bool = False


class WorkerBye(Base, frozen=True, kw_only=True, tag="W_BYE"):
    """The worker is leaving; everything is parked."""

    worker_epoch: int


class NoSession(Base, frozen=True, kw_only=True, tag="W_NO_SESSION"):
    """Broker to worker: I do not know you; say READY."""


class WorkerRefused(Base, frozen=True, kw_only=True, tag="W_REFUSED"):
    """Broker to worker: READY was refused and will be again; exit and say ``error``."""

    error: ErrorInfo


ToWorker = (
    WorkerWelcome
    | Estimate
    | Load
    | Unload
    | Forget
    | Budget
    | Run
    | CancelRun
    | Drain
    | WorkerPong
    | NoSession
    | WorkerRefused
)
FromWorker = (
    Ready
    | Estimated
    | Loaded
    | WorkerOk
    | Started
    | RunTokens
    | RunDone
    | Failed
    | Residency
    | WorkerPing
    | WorkerBye
)
