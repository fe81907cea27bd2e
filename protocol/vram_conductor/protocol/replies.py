"""What workers say to the broker (SPEC.md, section "Worker messages").

Every reply echoes the command's ``(broker_epoch, op)`` and carries the worker's own epoch; the
broker drops what does not match, so nothing from a previous life can change a ledger.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vram_conductor.protocol.base import Base
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.values import (
    ConversationKey,
    DeviceInfo,
    Line,
    Memory,
    ModelInfo,
    MoveRate,
    PoolShape,
    Usage,
)


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
        base_bytes: what the process itself takes on the device (CUDA context), and may still grow
            by.
        mechanism: ``state-swap`` or ``vmm-sleep``; ``mechanism_note`` says why.
        parked: states adopted from a previous life.
        host_total_bytes: arena capacity (shared memory) on the worker's host.
        features: what it can do that not every worker of this major version can.
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
    features: list[str] = []


class Reply(Base, frozen=True, kw_only=True):
    """Echo of a command's identity. ``order`` counts replies and reports of a session that can be
    resumed, from 1; 0: it cannot be."""

    broker_epoch: int
    op: int
    worker_epoch: int
    order: int = 0


class Estimated(Reply, frozen=True, kw_only=True, tag="ESTIMATED"):
    """Result of ESTIMATE.

    Attributes:
        weights_bytes, pool_bytes: on the device; the pool is KV + compute (+ recurrent).
        kv_bytes, compute_bytes, recurrent_bytes: the pool's parts.
        state_bytes: largest size of one sequence's parked state at ``n_ctx``.
        scratch_bytes: what a live context of the pool takes beyond its buffers.
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
    scratch_bytes: int = 0


class Loaded(Reply, frozen=True, kw_only=True, tag="LOADED"):
    """Result of LOAD. A None size was not allocated yet (``unmeasured``)."""

    weights_bytes: int | None = None
    pool_bytes: int | None = None
    scratch_bytes: int | None = None
    digest: str | None = None
    ms: float = 0.0


class WorkerOk(Reply, frozen=True, kw_only=True, tag="W_OK"):
    """UNLOAD, FORGET, BUDGET or DRAIN is done."""


class Copied(Reply, frozen=True, kw_only=True, tag="COPIED"):
    """Result of COPY: what was copied; if nothing was, ``n_tokens`` is 0 and ``reason`` says
    why."""

    n_tokens: int = 0
    state_bytes: int = 0
    reason: str = ""


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

    ``lines`` hold the same keys as the ledger (``base``, ``weights:…``, ``pool:…``, and one
    ``scratch:…`` per live context); ``host_lines`` the arenas (``parked:<conversation>``).
    ``rates``: what moves of each kind took, see ``status.DeviceStatus``.
    ``base_bytes``: what is to be promised for the process itself: the line ``base``, and what it
    may still grow by; None: the line alone.
    ``lingered``: how often weights left because nobody had used them for ``linger_s``.
    ``order``: as in a reply.
    """

    broker_epoch: int
    worker_epoch: int
    seq: int
    memory: Memory
    lines: list[Line] = []
    host_lines: list[Line] = []
    places: list[Place] = []
    swaps: int = 0
    rates: dict[str, MoveRate] = {}
    base_bytes: int | None = None
    lingered: int = 0
    order: int = 0


class WorkerPing(Base, frozen=True, kw_only=True, tag="W_PING"):
    """``steps`` counts engine steps, ``busy`` says whether it should be counting: together they
    tell a hung device from a busy one and from an idle one. ``op``: of the last command that has
    arrived in this session; 0: none, or it does not say."""

    n: int
    steps: int
    busy: bool = False
    op: int = 0


class Resume(Base, frozen=True, kw_only=True, tag="W_RESUME"):
    """A worker's first message over a new connection, where its session goes on.

    Attributes:
        device: which it serves.
        op: of the last command that has arrived; later ones are sent again.
    """

    device: str
    broker_epoch: int
    worker_epoch: int
    op: int


class WorkerBye(Base, frozen=True, kw_only=True, tag="W_BYE"):
    """The worker is leaving; everything is parked."""

    worker_epoch: int


FromWorker = (
    Ready
    | Estimated
    | Loaded
    | WorkerOk
    | Copied
    | Started
    | RunTokens
    | RunDone
    | Failed
    | Residency
    | WorkerPing
    | Resume
    | WorkerBye
)
