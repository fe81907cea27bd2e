"""Folding records that wait must not change what they do to any state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.broker.journal.backlog import Backlog, coalesce
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    AgentSpec,
    AgentUsed,
    BrokerEpoch,
    ConversationCommitted,
    ConversationReset,
    LeaseEnded,
    LeaseHeld,
    Record,
    WorkerEpochSeen,
)
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.values import AgentKey, ConversationKey, ModelInfo

MODEL = ModelInfo(
    model="m",
    name="m",
    path="/m",
    file_bytes=1,
    arch="llama",
    n_ctx_train=8,
    n_vocab=8,
    chat_template=False,
)


def registered(name: str, n_ctx: int = 256) -> AgentRegistered:
    spec = AgentSpec(model="m", n_ctx=n_ctx)
    return AgentRegistered(agent=AgentKey("p", name), spec=spec, device="cpu", model=MODEL)


KINDS = ["register", "remove", "used", "commit", "commit", "reset", "epoch", "lease", "released"]


def held(name: str, step: int) -> LeaseHeld:
    return LeaseHeld(
        principal="p", name=name, device="cpu", bytes=9, ttl_s=60, ends_unix_ns=step, park=True
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """Records as a core appends them: agents come and go, commits keep at most what is there."""
    records: list[Record] = []
    alive: set[str] = set()
    lengths: dict[ConversationKey, int] = {}
    turns: dict[ConversationKey, int] = {}
    versions: dict[ConversationKey, int] = {}
    for step in range(draw(st.integers(0, 25))):
        name = draw(st.sampled_from("ab"))
        kind = draw(st.sampled_from(KINDS))
        key = ConversationKey("p", name, draw(st.sampled_from(["main", "side"])))
        if kind == "register":
            records.append(registered(name, draw(st.sampled_from([256, 512]))))
            alive.add(name)
        elif kind == "epoch":
            records.append(BrokerEpoch(broker_epoch=step + 1))
            records.append(WorkerEpochSeen(device="cpu", worker_epoch=draw(st.integers(1, 9))))
        elif kind == "lease":
            records.append(held(name, step))
        elif kind == "released":
            records.append(LeaseEnded(principal="p", name=name))
        elif name not in alive:
            continue
        elif kind == "remove":
            records.append(AgentRemoved(agent=AgentKey("p", name)))
            alive.discard(name)
            for gone in [gone for gone in lengths if gone.agent == name]:
                del lengths[gone]
                turns.pop(gone, None)
        elif kind == "used":
            records.append(AgentUsed(agent=AgentKey("p", name), used_unix_ns=step))
        else:
            versions[key] = versions.get(key, 0) + 1
            if kind == "reset":
                records.append(ConversationReset(conversation=key, version=versions[key]))
                lengths[key] = turns[key] = 0
                continue
            keep = draw(st.integers(0, lengths.get(key, 0)))
            ids = draw(st.binary(min_size=4, max_size=4)) * draw(st.integers(1, 3))
            keep_turns = draw(st.integers(0, turns.get(key, 0)))
            more = [Turn(text=draw(st.text(max_size=3)))] * draw(st.integers(0, 3))
            records.append(
                ConversationCommitted(
                    conversation=key,
                    version=versions[key],
                    keep=keep,
                    ids=ids,
                    keep_turns=keep_turns,
                    turns=more,
                )
            )
            lengths[key] = keep + len(ids) // 4
            turns[key] = keep_turns + len(more)
    return records


def fold(*parts: list[Record]) -> Restored:
    state = Restored()
    for part in parts:
        for record in part:
            state.apply(record)
    return state


@given(histories(), st.data())
def test_coalescing_any_later_part_gives_the_same_state(
    history: list[Record], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(history)))
    before, waiting = history[:cut], history[cut:]
    assert fold(before, coalesce(waiting)) == fold(history)
    assert len(coalesce(waiting)) <= len(waiting)


@given(histories())
def test_a_backlog_that_folds_all_the_time_gives_the_same_state(history: list[Record]) -> None:
    backlog = Backlog(fold_bytes=0)
    for record in history:
        backlog.add(record)
    assert fold(backlog.records()) == fold(history)


def test_a_long_conversation_waits_as_one_record() -> None:
    backlog = Backlog(fold_bytes=100_000)
    backlog.add(registered("a"))
    key = ConversationKey("p", "a", "main")
    for version in range(1, 1001):
        backlog.add(
            ConversationCommitted(
                conversation=key, version=version, keep=(version - 1) % 50, ids=b"\0" * 400
            )
        )
    assert len(backlog) < 150
    assert backlog.bytes < 100_000


def test_dropping_what_was_written_keeps_the_rest_in_order() -> None:
    backlog = Backlog()
    epochs: list[Record] = [BrokerEpoch(broker_epoch=number) for number in range(5)]
    for epoch in epochs:
        backlog.add(epoch)
    backlog.drop(2)
    assert backlog.first() == epochs[2]
    assert backlog.records() == epochs[2:]
    backlog.drop(3)
    assert backlog.first() is None
    assert backlog.bytes == 0
