"""The folded journal (*pure*): what a new broker knows of the previous ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vram_conductor.broker.conversations.turns import Turns
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    AgentUsed,
    BrokerEpoch,
    ConversationCommitted,
    ConversationReset,
    LeaseEnded,
    LeaseHeld,
    Record,
    WorkerEpochSeen,
)
from vram_conductor.protocol.values import AgentKey, ConversationKey

ID_BYTES = 4
"""Size of one token id: int32, little-endian."""


@dataclass(slots=True)
class RestoredConversation:
    """A conversation's record: its token ids (int32 LE), version, and what was said."""

    version: int = 0
    transcript: bytearray = field(default_factory=bytearray)
    turns: Turns = field(default_factory=Turns)


@dataclass(slots=True)
class Restored:
    """State after all records so far. ``apply`` in order; ``records`` gives a compact journal."""

    broker_epoch: int = 0
    worker_epochs: dict[str, int] = field(default_factory=dict)
    agents: dict[AgentKey, AgentRegistered] = field(default_factory=dict)
    used_unix_ns: dict[AgentKey, int] = field(default_factory=dict)
    conversations: dict[ConversationKey, RestoredConversation] = field(default_factory=dict)
    leases: dict[tuple[str, str], LeaseHeld] = field(default_factory=dict)

    def apply(self, record: Record) -> None:
        """Fold one record in. Records about unknown agents are ignored (a torn journal)."""
        match record:
            case BrokerEpoch(broker_epoch=epoch):
                self.broker_epoch = max(self.broker_epoch, epoch)
            case WorkerEpochSeen(device=device, worker_epoch=epoch):
                # The last one welcomed: a clock that was set back must not lock a device for ever.
                self.worker_epochs[device] = epoch
            case AgentRegistered(agent=agent):
                self.agents[agent] = record
            case AgentRemoved(agent=agent):
                self.agents.pop(agent, None)
                self.used_unix_ns.pop(agent, None)
                for key in [key for key in self.conversations if key.agent_key == agent]:
                    del self.conversations[key]
            case AgentUsed(agent=agent) if agent in self.agents:
                self.used_unix_ns[agent] = record.used_unix_ns
            case ConversationCommitted(conversation=key) if key.agent_key in self.agents:
                state = self.conversations.setdefault(key, RestoredConversation())
                del state.transcript[record.keep * ID_BYTES :]
                state.transcript += record.ids
                state.turns.commit(record.keep_turns, record.turns)
                state.version = record.version
            case ConversationReset(conversation=key, version=0):
                self.conversations.pop(key, None)
            case ConversationReset(conversation=key) if key.agent_key in self.agents:
                self.conversations[key] = RestoredConversation(version=record.version)
            case LeaseHeld():
                self.leases[record.principal, record.name] = record
            case LeaseEnded():
                self.leases.pop((record.principal, record.name), None)
            case _:
                pass

    def records(self) -> Iterator[Record]:
        """The shortest list of records that folds to this state."""
        if self.broker_epoch:
            yield BrokerEpoch(broker_epoch=self.broker_epoch)
        for device, epoch in self.worker_epochs.items():
            yield WorkerEpochSeen(device=device, worker_epoch=epoch)
        yield from self.agents.values()
        for agent, used_unix_ns in self.used_unix_ns.items():
            yield AgentUsed(agent=agent, used_unix_ns=used_unix_ns)
        yield from self.leases.values()
        for key, state in self.conversations.items():
            yield ConversationCommitted(
                conversation=key,
                version=state.version,
                keep=0,
                ids=bytes(state.transcript),
                keep_turns=state.turns.first,
                turns=state.turns.view(),
            )
