"""Journal records (*pure*): the facts that survive the broker, one msgpack map each.

Appended in order; ``restored.Restored`` folds them back. ``t`` is the
tag, as on the wire. Unknown fields are ignored; a reader skips records with an unknown tag.
"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    KVType,
    ModelInfo,
    Sampling,
)


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What REGISTER asked for, defaults filled in; two equal specs are the same request.

    Attributes:
        model: as the client named it.
        n_ctx: guaranteed context, in tokens.
        device: the device the client insisted on; None means best fit.
        bare_path: the client had the right to name a file by its path.
        defaulted: what the client left to the configuration: ``n_ctx``, ``kv_type``.
    """

    model: str
    n_ctx: int
    kv_type: KVType = "f16"
    device: str | None = None
    slots: int = 1
    priority: int = 0
    sampling: Sampling = Sampling()
    ephemeral: bool = False
    ttl_s: int | None = None
    linger_s: int | None = None
    bare_path: bool = False
    defaulted: tuple[str, ...] = ()


class RecordBase(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="t"):
    """Common base of the journal's records."""


class BrokerEpoch(RecordBase, frozen=True, kw_only=True, tag="BROKER_EPOCH"):
    """A broker started. The shell appends it before it binds its sockets."""

    broker_epoch: int


class WorkerEpochSeen(RecordBase, frozen=True, kw_only=True, tag="WORKER_EPOCH"):
    """A worker of ``device`` was welcomed; an older one is refused from now on."""

    device: str
    worker_epoch: int


class AgentRegistered(RecordBase, frozen=True, kw_only=True, tag="AGENT"):
    """An agent was admitted and committed. An ephemeral one is recorded, too: its clients may come
    back to the next broker."""

    agent: AgentKey
    spec: AgentSpec
    device: str
    model: ModelInfo


class AgentRemoved(RecordBase, frozen=True, kw_only=True, tag="AGENT_REMOVED"):
    """An agent is gone, with all its conversations."""

    agent: AgentKey


class AgentUsed(RecordBase, frozen=True, kw_only=True, tag="AGENT_USED"):
    """An agent with a ``ttl_s`` was used.

    Attributes:
        used_unix_ns: when, by the time of day.
    """

    agent: AgentKey
    used_unix_ns: int


class ConversationCommitted(RecordBase, frozen=True, kw_only=True, tag="CONVERSATION"):
    """A job ended with output: transcript = transcript[:keep] + ids.

    Attributes:
        version: the version from now on.
        keep: tokens of the old transcript that stay.
        ids: what follows, as int32 little-endian.
        keep_turns, turns: likewise, of what was said; turns that are to be kept and are not there
            were forgotten.
    """

    conversation: ConversationKey
    version: int
    keep: int
    ids: bytes
    keep_turns: int = 0
    turns: list[Turn] = []


class ConversationReset(RecordBase, frozen=True, kw_only=True, tag="CONVERSATION_RESET"):
    """The transcript is empty again; the version still grows, so that a resend is noticed.
    Version 0: the conversation is forgotten, because another one needed its place."""

    conversation: ConversationKey
    version: int


class LeaseHeld(RecordBase, frozen=True, kw_only=True, tag="LEASE"):
    """A lease was granted or renewed. Ephemeral leases are never recorded.

    Attributes:
        ends_unix_ns: when it ends, by the time of day.
    """

    principal: str
    name: str
    device: str
    bytes: int
    ttl_s: int
    ends_unix_ns: int
    park: bool = True


class LeaseEnded(RecordBase, frozen=True, kw_only=True, tag="LEASE_ENDED"):
    """A lease was released, or its time is over."""

    principal: str
    name: str


Record = (
    BrokerEpoch
    | WorkerEpochSeen
    | AgentRegistered
    | AgentRemoved
    | AgentUsed
    | ConversationCommitted
    | ConversationReset
    | LeaseHeld
    | LeaseEnded
)
