"""Agents and their conversations (*pure*): who exists, and each one's record.

A conversation's transcript is the record of its token ids (int32, little-endian); its KV is a
cache that a worker may or may not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vram_conductor.broker.conversations.copying import Copying
from vram_conductor.broker.conversations.turns import Turns
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.journal.restored import ID_BYTES
from vram_conductor.protocol import limits
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import ErrorInfo, NotFound, ResourceExhausted
from vram_conductor.protocol.status import AgentState
from vram_conductor.protocol.values import AgentKey, ConversationKey, ModelInfo


@dataclass(slots=True)
class Conversation:
    """One conversation.

    Attributes:
        version: grows by one with every committed job and every reset.
        transcript: token ids, 4 bytes each.
        running: id of the job that the worker has, None if there is none.
        queued: number of jobs that wait behind it.
        turns: what was said.
        copying: the FORK that made it, if one did.
        used_ns: end of its last job, or last FORK of it or to it; 0: none in this broker's life.
        given_up: its parked KV was, for the principal's quota, and no job has said so yet.
            ``going``: nor has the worker.
    """

    key: ConversationKey
    version: int = 0
    transcript: bytearray = field(default_factory=bytearray)
    running: int | None = None
    queued: int = 0
    turns: Turns = field(default_factory=Turns)
    copying: Copying | None = None
    used_ns: int = 0
    given_up: bool = False
    going: bool = False

    @property
    def tokens(self) -> int:
        return len(self.transcript) // ID_BYTES

    @property
    def busy(self) -> bool:
        return self.running is not None or self.queued > 0

    def commit(
        self, keep: int, ids: bytes, keep_turns: int = 0, turns: Sequence[Turn] = ()
    ) -> None:
        """transcript = transcript[:keep] + ids, and likewise the turns; one version further."""
        del self.transcript[keep * ID_BYTES :]
        self.transcript += ids
        self.turns.commit(keep_turns, turns)
        self.version += 1

    def clear(self) -> None:
        """Forget the tokens. The version still grows, so that a resend is noticed."""
        self.transcript = bytearray()
        self.turns = Turns()
        self.version += 1


@dataclass(slots=True)
class Agent:
    """An admitted agent.

    Attributes:
        device: where it lives, for good.
        owners: ephemeral agents: the sessions (peers) that keep it alive.
        reason: why it is suspended.
        used_ns: last REGISTER or end of a job, for ``ttl_s``.
    """

    key: AgentKey
    spec: AgentSpec
    device: str
    model: ModelInfo
    state: AgentState
    used_ns: int
    reason: ErrorInfo | None = None
    owners: set[bytes] = field(default_factory=set)
    conversations: dict[str, Conversation] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return any(item.busy for item in self.conversations.values())


class Registry:
    """All agents, in the order of their registration."""

    def __init__(self) -> None:
        self._agents: dict[AgentKey, Agent] = {}
        self._per_principal: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def __iter__(self) -> Iterator[Agent]:
        return iter(self._agents.values())

    def find(self, key: AgentKey) -> Agent | None:
        return self._agents.get(key)

    def get(self, key: AgentKey) -> Agent:
        """Raises NotFound ``no_such_agent``."""
        agent = self._agents.get(key)
        if agent is None:
            raise NotFound(
                "no_such_agent",
                f"no agent named {key.agent!r} is registered",
                agent=key.agent,
            )
        return agent

    def of(self, principal: str) -> Iterator[Agent]:
        """The agents of one principal."""
        return (agent for agent in self if agent.key.principal == principal)

    def on(self, device: str) -> Iterator[Agent]:
        """The agents of one device."""
        return (agent for agent in self if agent.device == device)

    def count(self, principal: str) -> int:
        """How many agents one principal has."""
        return self._per_principal.get(principal, 0)

    def add(self, agent: Agent) -> None:
        assert agent.key not in self._agents
        self._agents[agent.key] = agent
        principal = agent.key.principal
        self._per_principal[principal] = self._per_principal.get(principal, 0) + 1

    def remove(self, key: AgentKey) -> None:
        del self._agents[key]
        self._per_principal[key.principal] -= 1
        if not self._per_principal[key.principal]:
            del self._per_principal[key.principal]

    def conversation(self, key: ConversationKey) -> Conversation | None:
        agent = self._agents.get(key.agent_key)
        return agent.conversations.get(key.conversation) if agent else None


def make_place(agent: Agent, name: str) -> Conversation | None:
    """Where the agent has no place for a new conversation ``name``: forget the first one that was
    reset and has no job, and return it."""
    full = len(agent.conversations) >= limits.CONVERSATIONS_PER_AGENT_MAX
    if not full or name in agent.conversations:
        return None
    for old, conversation in agent.conversations.items():
        if not conversation.transcript and not conversation.busy:
            return agent.conversations.pop(old)
    return None


def open_conversation(agent: Agent, name: str) -> Conversation:
    """The agent's conversation ``name``, created empty if need be.

    Raises ResourceExhausted ``too_many_conversations``.
    """
    found = agent.conversations.get(name)
    if found is not None:
        return found
    count = len(agent.conversations)
    if count >= limits.CONVERSATIONS_PER_AGENT_MAX:
        raise ResourceExhausted(
            "too_many_conversations",
            f"agent {agent.key.agent!r} has {count} conversations, the limit is "
            f"{limits.CONVERSATIONS_PER_AGENT_MAX}; reset one that is no longer needed, or "
            "unregister the agent",
            conversations=count,
            limit=limits.CONVERSATIONS_PER_AGENT_MAX,
        )
    key = ConversationKey(agent.key.principal, agent.key.agent, name)
    agent.conversations[name] = Conversation(key)
    return agent.conversations[name]


def drop_if_unused(agent: Agent, conversation: Conversation) -> bool:
    """Forget a conversation that never got a token, so that failed jobs leave nothing behind.
    Returns whether it was forgotten."""
    if conversation.busy or conversation.version or conversation.transcript:
        return False
    return agent.conversations.pop(conversation.key.conversation, None) is not None
