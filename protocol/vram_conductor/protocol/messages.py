"""Messages between clients and the broker (SPEC.md, section "Client messages").

Every message is one msgpack map; ``t`` names its type. Unknown fields are ignored, so a newer
peer can add some. Every request carries ``rid``, 16 bytes chosen by the client; every reply to
it carries the same ``rid``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.protocol.base import Base
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.drain import DrainDevice
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.leasing import Lease as Lease
from vram_conductor.protocol.limits import DEFAULT_CONVERSATION
from vram_conductor.protocol.values import KVType, Message, Overflow, Sampling, Usage

# --- client to broker -------------------------------------------------------------------------


class Hello(Base, frozen=True, kw_only=True, tag="HELLO"):
    """First message of a session. ``v`` is [major, minor]; ``client`` names the library."""

    v: tuple[int, int]
    client: str = ""
    features: list[str] = []


class Register(Base, frozen=True, kw_only=True, tag="REGISTER"):
    """Admit an agent. The same name with the same parameters is a no-op that answers OK.

    Attributes:
        agent: the agent's name, unique per principal.
        model: a name of the catalogue, or a path where the worker allows it.
        n_ctx: guaranteed context, in tokens. None takes the configured default, or the context
            that the model was trained with where that is less.
        kv_type: element type of the KV cache. None takes the configured default.
        device: place on this device; None means best fit.
        slots: how many of the model's agents may hold KV on the device at once; the pool has
            the largest number that any of its agents asks for.
        priority: higher runs first; aging keeps lower ones alive.
        sampling: defaults of this agent.
        ephemeral: unregister when the session ends.
        ttl_s: unregister after this many idle seconds.
        linger_s: the model's weights leave the device so many seconds after the last job, and
            stay for so many after the last of its agents has gone. None: while there is an agent.
    """

    rid: bytes
    agent: str
    model: str
    n_ctx: int | None = None
    kv_type: KVType | None = None
    device: str | None = None
    slots: int = 1
    priority: int = 0
    sampling: Sampling = Sampling()
    ephemeral: bool = False
    ttl_s: int | None = None
    linger_s: int | None = None


class Unregister(Base, frozen=True, kw_only=True, tag="UNREGISTER"):
    """Remove an agent; its jobs are cancelled, its conversations forgotten. ``principal``: whose;
    None: the sender's own. Anybody else's is an admin's to name."""

    rid: bytes
    agent: str
    principal: str | None = None


class List(Base, frozen=True, kw_only=True, tag="LIST"):
    """Ask for the principal's agents. OK.body: ``{"agents": [AgentStatus, …]}``."""

    rid: bytes


class Status(Base, frozen=True, kw_only=True, tag="STATUS"):
    """Ask for the whole picture. OK.body is a ``status.StatusReport``."""

    rid: bytes


class Decode(Base, frozen=True, kw_only=True, tag="DECODE"):
    """Run one job. Exactly one of ``messages``, ``prompt``, ``tokens`` is given.

    Attributes:
        continue_: False: the input is the whole conversation, the common prefix is re-used.
            True: the input is appended to the conversation as it stands.
        messages: chat messages, rendered with the model's own template.
        prompt: raw text (special tokens are parsed).
        tokens: raw token ids.
        max_tokens: None means until the context is full.
        stop: stop strings; they are not part of the output and may span tokens.
        grammar: GBNF; the output follows its rule ``root``.
        json_schema: the output is JSON that is valid by this schema. At most one of both.
        logit_bias: [token id, bias] pairs.
        window: None means unlimited credit, else the first ``upto`` of the credit.
        expect_version: ABORTED unless the conversation has this version.
        queue_ms: give up if not started within this time.
        timeout_ms: give up if not finished within this time.
        detach: go on when the client is gone.
        return_ids: send token ids beside the text.
        overflow: what to do when the context is full; only ``error`` everywhere.
    """

    rid: bytes
    agent: str
    conversation: str = DEFAULT_CONVERSATION
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
    window: int | None = None
    expect_version: int | None = None
    queue_ms: int | None = None
    timeout_ms: int | None = None
    priority: int | None = None
    detach: bool = False
    return_ids: bool = False
    overflow: Overflow = "error"

    @property
    def structured(self) -> bool:
        """Whether the output follows a grammar or a schema."""
        return self.grammar is not None or self.json_schema is not None


class Credit(Base, frozen=True, kw_only=True, tag="CREDIT"):
    """Absolute and cumulative: everything < ``ack`` has arrived, < ``upto`` may be sent."""

    rid: bytes
    ack: int
    upto: int


class Cancel(Base, frozen=True, kw_only=True, tag="CANCEL"):
    """Cancel the job of ``rid``. Idempotent; the job still ends with DONE or ERROR."""

    rid: bytes


class Resume(Base, frozen=True, kw_only=True, tag="RESUME"):
    """Re-attach to the job of ``rid`` and receive everything from ``from_seq`` on."""

    rid: bytes
    from_seq: int = 0
    window: int | None = None


class Reset(Base, frozen=True, kw_only=True, tag="RESET"):
    """Forget a conversation (transcript and KV); the agent stays registered. ``forget``: its name
    and version, too."""

    rid: bytes
    agent: str
    conversation: str = DEFAULT_CONVERSATION
    forget: bool = False


class Ping(Base, frozen=True, kw_only=True, tag="PING"):
    n: int = 0


class Bye(Base, frozen=True, kw_only=True, tag="BYE"):
    """The session ends now; ephemeral agents go, undetached jobs are cancelled."""


# --- broker to client -------------------------------------------------------------------------


class Welcome(Base, frozen=True, kw_only=True, tag="WELCOME"):
    """The session is open. ``broker_epoch`` changes when the broker restarts."""

    v: tuple[int, int]
    session: str
    broker_epoch: int
    principal: str
    heartbeat_ms: int
    limits: dict[str, int] = {}
    features: list[str] = []


class Ok(Base, frozen=True, kw_only=True, tag="OK"):
    """A request other than DECODE succeeded."""

    rid: bytes
    body: dict[str, Any] = {}


class Accepted(Base, frozen=True, kw_only=True, tag="ACCEPTED"):
    """A DECODE is queued. ``position`` counts the jobs ahead; ``est_ms`` is a guess or None."""

    rid: bytes
    job: int
    position: int
    est_ms: int | None = None


class Tokens(Base, frozen=True, kw_only=True, tag="TOKENS"):
    """A piece of output: whole characters only. ``seq`` counts 0, 1, 2 … per job."""

    rid: bytes
    seq: int
    text: str
    ids: list[int] = []


class Done(Base, frozen=True, kw_only=True, tag="DONE"):
    """Terminal. ``seq`` is one past the last TOKENS."""

    rid: bytes
    seq: int
    usage: Usage


class Error(Base, frozen=True, kw_only=True, tag="ERROR"):
    """Terminal for ``rid``; with an empty ``rid`` it concerns the session."""

    rid: bytes
    error: ErrorInfo
    seq: int | None = None
    usage: Usage | None = None


class Progress(Base, frozen=True, kw_only=True, tag="PROGRESS"):
    """Optional news about a slow request: ``stage`` is a stable word: ``worker`` (waits for
    one), ``estimate``, ``load``, ``park``, ``drain``."""

    rid: bytes
    stage: str
    done: int = 0
    total: int = 0
    note: str = ""


class GoAway(Base, frozen=True, kw_only=True, tag="GOAWAY"):
    """The broker is draining: finish what runs, send nothing new, reconnect later."""

    reason: str
    drain_ms: int


class Pong(Base, frozen=True, kw_only=True, tag="PONG"):
    n: int = 0


ClientMessage = (
    Hello
    | Register
    | Unregister
    | Fit
    | List
    | Status
    | Decode
    | Credit
    | Cancel
    | Resume
    | Reset
    | Fork
    | History
    | Lease
    | DrainDevice
    | Ping
    | Bye
)
BrokerMessage = Welcome | Ok | Accepted | Tokens | Done | Error | Progress | GoAway | Pong
