"""The answer to STATUS (and, in part, LIST): the whole picture as typed structs.

OK.body is the struct as plain maps; ``msgspec.convert(body, StatusReport)`` types it again. All
byte counts are ints in bytes, all times ints in milliseconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.values import (
    DeviceKind,
    KVType,
    LedgerMode,
    Line,
    Memory,
    MoveRate,
)

AgentState = Literal["loading", "ready", "waiting", "suspended"]
"""``loading``: LOAD is on its way. ``waiting``: its device has no worker right now.
``suspended``: it was admitted once and does not fit now; it comes back when it does."""

Where = Literal["slot", "parked", "absent"]


class StatusStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Common base. Defaults travel too, so that every key is there for readers of plain maps."""


class WorkerStatus(StatusStruct, frozen=True, kw_only=True):
    """A device's worker.

    Attributes:
        steps, busy: its last word on its work loop; busy and not counting means hung.
        silent_ms: for how long nothing was heard.
        in_flight: attempts that it has.
        away_ms: so much longer it is waited for, because its connection is lost or it is silent;
            None: it is there.
    """

    worker: str
    worker_epoch: int
    pid: int
    host: str
    version: str
    build: str
    mechanism: str = "state-swap"
    mechanism_note: str = ""
    steps: int = 0
    busy: bool = False
    silent_ms: int = 0
    in_flight: int = 0
    draining: bool = False
    away_ms: int | None = None


class LedgerStatus(StatusStruct, frozen=True, kw_only=True):
    """Promised bytes of one resource: ``promised_bytes + foreign_bytes <= cap_bytes``."""

    cap_bytes: int
    promised_bytes: int = 0
    lines: list[Line] = []


class LeaseStatus(StatusStruct, frozen=True, kw_only=True):
    """Device memory that a program outside was promised for a time.

    Attributes:
        state: ``pending``: agents are making room; ``held``: the room is there.
        left_ms: until it ends by itself; None while it is pending.
    """

    principal: str
    name: str
    device: str
    bytes: int
    state: Literal["pending", "held"]
    ttl_s: int
    left_ms: int | None = None
    park: bool = True
    ephemeral: bool = False


class DeviceStatus(StatusStruct, frozen=True, kw_only=True):
    """One device.

    Attributes:
        promised: the ledger of the device's memory.
        host: the ledger of shared memory for parked states.
        resident: what the worker says is on the device, with the ledger's keys.
        resident_bytes: sum of ``resident``.
        parked: what the worker says is in shared memory.
        memory: the last sample; None until a worker reported one.
        sample_age_ms: age of ``memory``; too old a sample is a deny.
        unattributed_bytes: used - resident - foreign of the sample, for what no line explains.
        foreign_bytes: what others use, without what holders of leases use of theirs.
        budget_bytes: what the worker may use: cap - foreign - leases.
        leases: those of the principal who asks, by their end.
        worker: None while the device has none; then ``absent_ms`` says for how long, ``away`` why
            (the last one was ``stopped``, or ``lost``; empty: there was none yet), and
            ``patience_ms`` for how much longer jobs wait for the next one.
        swaps: how often a conversation's KV was moved, since the worker's start.
        rates: what moves took, by kind: ``wake``, ``wake_weights``, ``sleep_weights``,
            ``wake_pool``, ``sleep_pool``, ``back_up``, ``load``, ``open_pool``, ``state_out``,
            ``state_in``.
        lingered: how often weights left because nobody had used them for ``linger_s``, since the
            worker's start.
    """

    device: str
    kind: DeviceKind
    name: str = ""
    mode: LedgerMode = "reserve"
    promised: LedgerStatus
    host: LedgerStatus
    resident: list[Line] = []
    resident_bytes: int = 0
    parked: list[Line] = []
    memory: Memory | None = None
    sample_age_ms: int | None = None
    unattributed_bytes: int = 0
    foreign_bytes: int = 0
    budget_bytes: int = 0
    leases: list[LeaseStatus] = []
    worker: WorkerStatus | None = None
    absent_ms: int = 0
    away: Literal["", "stopped", "lost"] = ""
    patience_ms: int = 0
    swaps: int = 0
    rates: dict[str, MoveRate] = {}
    lingered: int = 0


class ConversationStatus(StatusStruct, frozen=True, kw_only=True):
    """One conversation.

    Attributes:
        tokens, version: the record (the broker's).
        where: its KV, as the worker last said; ``kv_tokens`` how many tokens that covers.
        parked_bytes: size of its parked state.
    """

    conversation: str
    tokens: int
    version: int
    where: Where = "absent"
    kv_tokens: int = 0
    parked_bytes: int = 0


class AgentStatus(StatusStruct, frozen=True, kw_only=True):
    """One agent.

    Attributes:
        model, model_id: as asked for; the identity in ledger lines.
        shared_with: other agents on the same weights, as ``principal/agent``, at most 16; the
            rest, and those of other principals, are counted in a last entry (``2 others``).
        pool_bytes: of the whole pool, which the agents of this model and KV type share.
        state_bytes: largest parked state of one conversation.
        unmeasured: the sizes are estimates; nothing was allocated yet.
        rollback: how far a parked state can be rolled back (see ModelInfo).
        reason: why it is ``suspended`` or ``waiting``.
    """

    principal: str
    agent: str
    model: str
    model_id: str
    device: str
    state: AgentState
    n_ctx: int
    kv_type: KVType = "f16"
    slots: int = 1
    priority: int = 0
    weights_bytes: int = 0
    pool_bytes: int = 0
    state_bytes: int = 0
    unmeasured: bool = False
    shared_with: list[str] = []
    rollback: Literal["any", "window", "none"] = "any"
    ephemeral: bool = False
    ttl_s: int | None = None
    linger_s: int | None = None
    idle_ms: int = 0
    reason: ErrorInfo | None = None
    conversations: list[ConversationStatus] = []
    queued: int = 0
    running: int = 0


class JobStatus(StatusStruct, frozen=True, kw_only=True):
    """A job that is not over.

    Attributes:
        state: ``queued`` (at the broker), ``sent`` (waits at the worker), ``running``.
        attempt: 1 for the first.
        age_ms: since its receipt.
        waiting: what it waits for beside its turn: ``lease:<principal>/<name>``, ``foreign``,
            ``worker``; empty: nothing.
        waiting_ms: when that ends by itself at the latest; None: nobody knows.
    """

    job: int
    principal: str
    agent: str
    conversation: str
    device: str
    state: Literal["queued", "sent", "running"]
    attempt: int = 1
    age_ms: int = 0
    generated_tokens: int = 0
    priority: int = 0
    waiting: str = ""
    waiting_ms: int | None = None


SweepReason = Literal["session_ended", "not_back", "idle"]
"""``session_ended``: the last session of an ephemeral agent ended. ``not_back``: its connection was
lost, or the broker restarted, and none of its clients came back in time. ``idle``: ``ttl_s``."""


class SweptStatus(StatusStruct, frozen=True, kw_only=True):
    """An agent that the broker unregistered by itself, ``age_ms`` ago."""

    principal: str
    agent: str
    device: str
    reason: SweepReason
    age_ms: int = 0


class SweepStatus(StatusStruct, frozen=True, kw_only=True):
    """Which agents the broker unregistered by itself, since its start.

    Attributes:
        session_ended, not_back, idle: how many, by reason, of all principals.
        last: the latest ones of the principal who asks, at most 16, the latest first.
    """

    session_ended: int = 0
    not_back: int = 0
    idle: int = 0
    last: list[SweptStatus] = []


class StatusReport(StatusStruct, frozen=True, kw_only=True):
    """The whole picture.

    Attributes:
        agents, jobs: those of the principal who asks; ``agents_total`` counts all.
        queued, queued_max: jobs that wait at the broker, and the bound.
        jobs: those that run first, then the queue in order of receipt.
        jobs_done, jobs_failed: since the broker's start.
        journal_trouble: why agents and conversations would not survive a crash of the broker
            right now (a full disk); empty when all is well.
        version: of the broker's package.
        sweep: agents that nobody wanted any more.
    """

    broker_epoch: int
    version: str = ""
    uptime_ms: int = 0
    draining: bool = False
    sessions: int = 0
    devices: list[DeviceStatus] = []
    agents: list[AgentStatus] = []
    agents_total: int = 0
    queued: int = 0
    queued_max: int = 0
    jobs: list[JobStatus] = []
    jobs_done: int = 0
    jobs_failed: int = 0
    journal_trouble: str = ""
    sweep: SweepStatus = SweepStatus()


class AgentList(StatusStruct, frozen=True, kw_only=True):
    """The answer to LIST."""

    agents: list[AgentStatus] = []
