"""Value types that several messages share. All byte counts are ints in bytes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

KVType = Literal["f16", "q8_0", "q4_0", "f32"]
"""Element type of the KV cache (ggml names). Quantised V needs flash attention."""

DeviceKind = Literal["cuda", "cpu"]
LedgerMode = Literal["reserve", "timeshare"]
Overflow = Literal["error", "shift"]
StopReason = Literal["eos", "stop", "length", "cancelled", "grammar"]
"""``eos``: end-of-generation token; ``stop``: a stop string; ``length``: ``max_tokens``;
``grammar``: nothing more may follow by the grammar or schema."""


class Message(msgspec.Struct, frozen=True):
    """One chat message, as chat templates expect it."""

    role: str
    content: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters. None inherits: DECODE → agent → :data:`SAMPLING_DEFAULTS`.

    Attributes:
        temperature: 0 means greedy. >= 0.
        top_k: 0 disables. >= 0.
        top_p: nucleus mass in (0, 1].
        min_p: in [0, 1].
        repeat_penalty: 1.0 disables. > 0.
        presence_penalty, frequency_penalty: 0 disables; in [-2, 2].
        penalty_last_n: how many last tokens are penalised; 0 disables, -1 all of the context.
        seed: unsigned 32 bit; None draws one, which DONE reports.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_last_n: int | None = None
    seed: int | None = None

    def over(self, base: Sampling) -> Sampling:
        """These parameters, with what is None here taken from ``base``."""
        own = msgspec.structs.asdict(self)
        mine = {name: value for name, value in own.items() if value is not None}
        return msgspec.structs.replace(base, **mine)


SAMPLING_DEFAULTS = Sampling(
    temperature=0.8,
    top_k=40,
    top_p=0.95,
    min_p=0.05,
    repeat_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    penalty_last_n=64,
)


class AgentKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An agent's identity: principal and name."""

    principal: str
    agent: str

    def __str__(self) -> str:
        return f"{self.principal}/{self.agent}"


class ConversationKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A conversation's identity. ``main`` unless the client names another."""

    principal: str
    agent: str
    conversation: str

    @property
    def agent_key(self) -> AgentKey:
        return AgentKey(self.principal, self.agent)

    def __str__(self) -> str:
        return f"{self.principal}/{self.agent}/{self.conversation}"


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the worker found out about a GGUF file.

    Attributes:
        model: identity used in ledger keys: a short digest of (device, inode, size, mtime_ns)
            at admission. Two names of one file are one model.
        name: the name it was asked for by.
        path: where the worker found it.
        file_bytes: size of the file.
        arch: ``general.architecture``.
        n_ctx_train: context length the model was trained with, in tokens.
        n_vocab: vocabulary size.
        chat_template: whether the file brings one.
        rollback: ``any`` (full attention), ``window`` (sliding window), ``none`` (recurrent,
            hybrid): how far a parked state can be rolled back for prefix re-use.
        digest: sha256 of the content where it is known, else None.
    """

    model: str
    name: str
    path: str
    file_bytes: int
    arch: str
    n_ctx_train: int
    n_vocab: int
    chat_template: bool
    rollback: Literal["any", "window", "none"] = "any"
    digest: str | None = None


class PoolShape(msgspec.Struct, frozen=True, order=True):
    """Dimensions of a pool (one ``llama_context``).

    Attributes:
        cells: KV cells, already padded to a multiple of 256.
        slots: number of sequences.
        kv_type: element type of K and V.
    """

    cells: int
    slots: int
    kv_type: KVType = "f16"


class DeviceInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A device as its worker reports it in READY.

    Attributes:
        device: ``cuda:0``, ``cpu``, ``cpu:1`` …
        kind: ``cuda`` or ``cpu``.
        name: marketing name, or the processor's.
        total_bytes: physical size (cpu: the configured capacity).
        reserved_bytes: the driver's own reserve, never ours (0 on cpu).
        uuid: GPU UUID, empty on cpu.
    """

    device: str
    kind: DeviceKind
    name: str
    total_bytes: int
    reserved_bytes: int = 0
    uuid: str = ""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a device's memory, taken between moves only.

    Attributes:
        used_bytes: all that is in use on the device, by anybody.
        own_bytes: what this worker has allocated.
        foreign_bytes: what others use (design: max(0, used - own - leases in use)).
        age_ms: how old the sample was when it was sent.
    """

    used_bytes: int
    own_bytes: int
    foreign_bytes: int
    age_ms: int = 0


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a ledger: ``base``, ``weights:<model>``, ``pool:<model>`` …

    Attributes:
        key: the line's name.
        bytes: its size.
        unmeasured: committed at the estimate; not allocated yet.
        detail: free text for a person (file name, cells × slots …).
        shape: pool lines of RESIDENCY: the dimensions that were allocated.
    """

    key: str
    bytes: int
    unmeasured: bool = False
    detail: str = ""
    shape: PoolShape | None = None


class Swap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What had to move before a job could run.

    Attributes:
        evicted: conversations, pools and weights that left the device for this job; to a client,
            other principals' conversations are counted in a last entry (``2 others``).
        restored: this conversation's parked KV was put back.
        bytes: bytes moved, both directions.
        ms: time spent moving, in milliseconds.
    """

    evicted: list[str] = []
    restored: bool = False
    bytes: int = 0
    ms: float = 0.0


class MoveRate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How fast one kind of move is, since the worker's start.

    Attributes:
        count: how many moves there were.
        bytes, ms: their sums; two readings tell the rate of what was moved between them.
        last_bytes, last_ms: of the last one.
    """

    count: int = 0
    bytes: int = 0
    ms: float = 0.0
    last_bytes: int = 0
    last_ms: float = 0.0


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The receipt of one job, carried by DONE.

    Attributes:
        prompt_tokens: length of the whole prompt, history included.
        reused_tokens: prompt tokens whose KV was re-used.
        reprefilled_tokens: tokens that had KV or should have had, and were computed again.
        reprefill_reason: why; empty if ``reprefilled_tokens`` is 0.
        generated_tokens: tokens sampled, the end token included.
        stop_reason: see :data:`StopReason`.
        queue_ms, ttft_ms, elapsed_ms: receipt → start, receipt → first token, receipt → end,
            measured by the broker (``prefill_ms``, ``decode_ms``: by the worker).
        state_version: the conversation's version after this job.
        seed: the seed that was used.
        swap: what moved.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    reprefilled_tokens: int = 0
    reprefill_reason: str = ""
    generated_tokens: int = 0
    stop_reason: StopReason = "eos"
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    elapsed_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    state_version: int = 0
    seed: int = 0
    swap: Swap = Swap()


Details = dict[str, Any]
