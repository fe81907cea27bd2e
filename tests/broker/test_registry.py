"""Agents, conversations, and what a folded journal makes of them."""

from __future__ import annotations

import msgspec
import pytest
from scripted_worker import MODELS

from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    AgentSpec,
    BrokerEpoch,
    ConversationCommitted,
    ConversationReset,
    Record,
    WorkerEpochSeen,
)
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.registry import (
    Agent,
    Conversation,
    Registry,
    drop_if_unused,
    open_conversation,
)
from vram_conductor.protocol.errors import NotFound, ResourceExhausted
from vram_conductor.protocol.tokens import pack_tokens, unpack_tokens
from vram_conductor.protocol.values import AgentKey, ConversationKey


def agent(name: str = "coder", principal: str = "p") -> Agent:
    return Agent(
        key=AgentKey(principal, name),
        spec=AgentSpec(model="small", n_ctx=1024),
        device="cpu",
        model=MODELS["small"].info("small"),
        state="ready",
        used_ns=0,
    )


def record_of(item: Agent) -> AgentRegistered:
    return AgentRegistered(agent=item.key, spec=item.spec, device=item.device, model=item.model)


def test_registry_finds_counts_and_forgets() -> None:
    registry = Registry()
    registry.add(agent("a"))
    registry.add(agent("b"))
    registry.add(agent("a", principal="q"))
    assert len(registry) == 3
    assert [item.key.agent for item in registry.of("p")] == ["a", "b"]
    assert (registry.count("p"), registry.count("nobody")) == (2, 0)
    registry.remove(AgentKey("p", "a"))
    assert registry.find(AgentKey("p", "a")) is None
    with pytest.raises(NotFound, match="no agent named 'a' is registered"):
        registry.get(AgentKey("p", "a"))
    assert registry.count("p") == 1
    assert len(list(registry.on("cpu"))) == 2


def test_conversation_commits_and_resets() -> None:
    conversation = Conversation(ConversationKey("p", "a", "main"))
    conversation.commit(0, pack_tokens([1, 2, 3]))
    conversation.commit(2, pack_tokens([9]))
    assert unpack_tokens(bytes(conversation.transcript)) == [1, 2, 9]
    assert (conversation.version, conversation.tokens) == (2, 3)
    conversation.clear()
    assert (conversation.version, conversation.tokens) == (3, 0)


def test_unused_conversation_is_dropped_and_a_used_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.CONVERSATIONS_PER_AGENT_MAX", 2)
    owner = agent()
    one, two = open_conversation(owner, "one"), open_conversation(owner, "two")
    assert open_conversation(owner, "one") is one
    with pytest.raises(ResourceExhausted, match="limit is 2"):
        open_conversation(owner, "three")
    one.queued = 1
    drop_if_unused(owner, one)
    two.clear()
    drop_if_unused(owner, two)
    assert set(owner.conversations) == {"one", "two"}
    one.queued = 0
    drop_if_unused(owner, one)
    assert set(owner.conversations) == {"two"}


def journal() -> list[Record]:
    main = ConversationKey("p", "coder", "main")
    side = ConversationKey("p", "coder", "side")
    gone = agent("gone")
    return [
        BrokerEpoch(broker_epoch=7),
        WorkerEpochSeen(device="cpu", worker_epoch=50),
        WorkerEpochSeen(device="cpu", worker_epoch=40),
        record_of(agent()),
        ConversationCommitted(conversation=main, version=1, keep=0, ids=pack_tokens([1, 2, 3])),
        ConversationCommitted(conversation=main, version=2, keep=2, ids=pack_tokens([4])),
        ConversationCommitted(conversation=side, version=1, keep=0, ids=pack_tokens([8])),
        ConversationReset(conversation=side, version=2),
        record_of(gone),
        ConversationCommitted(
            conversation=ConversationKey("p", "gone", "main"), version=1, keep=0, ids=b"abcd"
        ),
        AgentRemoved(agent=gone.key),
        # A torn journal may speak of somebody it never introduced.
        ConversationCommitted(
            conversation=ConversationKey("p", "ghost", "main"), version=1, keep=0, ids=b"abcd"
        ),
    ]


def fold(records: list[Record]) -> Restored:
    restored = Restored()
    for record in records:
        restored.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record))
    return restored


def test_journal_folds_to_what_was() -> None:
    restored = fold(journal())
    assert restored.broker_epoch == 7
    # The last one welcomed, not the highest: clocks are set back now and then.
    assert restored.worker_epochs == {"cpu": 40}
    assert [key.agent for key in restored.agents] == ["coder"]
    states = {key.conversation: state for key, state in restored.conversations.items()}
    assert set(states) == {"main", "side"}
    assert unpack_tokens(bytes(states["main"].transcript)) == [1, 2, 4]
    assert (states["main"].version, states["side"].version) == (2, 2)
    assert states["side"].transcript == b""


def test_compact_journal_folds_to_the_same() -> None:
    restored = fold(journal())
    again = fold(list(restored.records()))
    assert again == restored
    assert len(list(restored.records())) == 5
