"""A principal's quota of KV, while conversations and forks park: what is given up, and what not."""

from __future__ import annotations

import pytest
from keyed_client import Keyed
from scripted_worker import MIB, Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.events import KeysChanged
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.keys import Quota
from vram_conductor.protocol.values import ConversationKey, Swap, Usage

AGENT_BYTES = 16 * MIB
"""Guaranteed to an agent with a context of 1024."""


class Tenants:
    """Alice may have 40 MiB of KV, bob as much as there is."""

    def __init__(self, kv_bytes: int | None = 40 * MIB) -> None:
        self.bench = Bench(config_of())
        self.worker: ScriptedWorker = self.bench.worker()
        self.limit(kv_bytes)
        self.alice, self.bob = (Keyed(self.bench, f"k-{name}", name) for name in ("alice", "bob"))
        for client in (self.alice, self.bob):
            client.ok(client.register("coder", n_ctx=1024))
        self.parked: dict[ConversationKey, int] = {}

    def limit(self, kv_bytes: int | None) -> None:
        quotas = {} if kv_bytes is None else {"alice": Quota(kv_bytes=kv_bytes)}
        self.bench.post(KeysChanged(quotas, {"k-alice": "alice", "k-bob": "bob"}))

    def say(self, client: Client, conversation: str, mib: int = 12) -> Usage:
        """One job, which leaves so much parked; the worker tells a moment later."""
        self.bench.now_ns += 1_000_000
        rid = client.decode("coder", prompt="hi", conversation=conversation, continue_=True)
        job = next(
            job
            for job in reversed(self.worker.jobs.values())
            if job.run.conversation == ConversationKey(client.principal, "coder", conversation)
        )
        self.worker.finish(job)
        self.parked[job.run.conversation] = mib * MIB
        self.report()
        return client.done(rid)

    def report(self) -> None:
        self.worker.residency(
            places=[
                c.Place(conversation=key, where="parked", n_tokens=5, parked_bytes=size)
                for key, size in self.parked.items()
            ]
        )

    def forgotten(self) -> list[str]:
        """Conversations that the worker was told to forget, of whom and which."""
        return [
            f"{gone.conversation.principal}/{gone.conversation.conversation}"
            for gone in self.worker.all(c.Forget)
        ]


def test_what_was_unused_for_longest_goes_and_nothing_that_was_said() -> None:
    tenants = Tenants()
    alice = tenants.alice
    for conversation in ("one", "two", "three"):
        tenants.say(alice, conversation)
        tenants.say(tenants.bob, conversation, 100)
    assert tenants.forgotten() == []
    tenants.say(alice, "one")
    tenants.say(alice, "four")
    assert tenants.forgotten() == ["alice/two"]
    rid = alice.history("coder", "two")
    assert alice.ok(rid)["tokens"] == 5
    # What the worker forgot it is told again, and whoever asks is told why it took longer.
    del tenants.parked[ConversationKey("alice", "coder", "two")]
    rid = alice.decode("coder", prompt="hi", conversation="two", continue_=True)
    job = tenants.worker.job("coder", "two")
    assert (job.run.n_raw, job.run.transcript_tokens) == (1, 5)
    runs = [run for run in tenants.worker.all(c.Run) if run.conversation == job.run.conversation]
    assert len(runs) == 2, "it did not have to ask for the transcript"
    tenants.worker.start(job)
    tenants.worker.tokens(job, "hi", [7, 8])
    usage = Usage(
        generated_tokens=2, reprefilled_tokens=5, reprefill_reason="state_missing", swap=Swap()
    )
    tenants.worker.jobs.pop(job.run.op)
    tenants.worker.reply(job.run, c.RunDone, job=job.run.job, usage=usage)
    assert alice.done(rid).reprefill_reason == "kv_quota"


def test_forks_count_and_what_they_are_made_of_is_in_use() -> None:
    tenants = Tenants()
    alice, worker = tenants.alice, tenants.worker
    worker.copied = {"n_tokens": 5, "state_bytes": 12 * MIB}
    tenants.say(alice, "main")
    for number in range(6):
        tenants.bench.now_ns += 1_000_000
        alice.ok(alice.fork("coder", f"copy{number}"))
        kept = len(tenants.bench.core._state.devices["cpu"].places)
        assert kept == min(number + 2, 3), "the original, and the newest two"
    gone = ["copy0", "copy1", "copy2", "copy3"]
    assert tenants.forgotten() == [f"alice/{name}" for name in gone]


def test_a_report_from_before_the_worker_has_done_it_costs_nothing_more() -> None:
    tenants = Tenants()
    tenants.worker.auto.discard(c.Forget)
    for conversation in ("one", "two", "three", "four"):
        tenants.say(tenants.alice, conversation)
    for _ in range(3):
        tenants.report()
    assert tenants.forgotten() == ["alice/one"]
    for command in list(tenants.worker.held):
        tenants.worker.answer(command)
    del tenants.parked[ConversationKey("alice", "coder", "one")]
    tenants.report()
    assert tenants.forgotten() == ["alice/one"]
    tenants.say(tenants.alice, "one")
    assert tenants.forgotten() == ["alice/one", "alice/two"], "it counts again"


def test_what_is_in_use_stays() -> None:
    tenants = Tenants()
    alice = tenants.alice
    for conversation in ("one", "two", "three"):
        tenants.say(alice, conversation)
    alice.decode("coder", prompt="hi", conversation="one", continue_=True)
    tenants.say(alice, "four")
    assert tenants.forgotten() == ["alice/two"]


@pytest.mark.parametrize(
    ("limit", "left"),
    [(None, 4), (48 * MIB, 4), (48 * MIB - 1, 3), (0, 1)],
)
def test_the_limit_is_exact_and_never_below_what_was_guaranteed(
    limit: int | None, left: int
) -> None:
    """A limit that shrinks leaves the agent's context: 16 MiB, which is one of 12 MiB."""
    tenants = Tenants(None)
    for conversation in ("one", "two", "three", "four"):
        tenants.say(tenants.alice, conversation)
    tenants.limit(limit)
    tenants.report()
    assert 4 - len(tenants.forgotten()) == left


def test_agents_that_go_take_their_parked_kv_with_them() -> None:
    tenants = Tenants()
    for conversation in ("one", "two", "three"):
        tenants.say(tenants.alice, conversation)
    tenants.alice.unregister("coder")
    tenants.report()
    assert tenants.forgotten() == []


def test_the_worker_dies_meanwhile() -> None:
    tenants = Tenants()
    tenants.worker.auto.discard(c.Forget)
    for conversation in ("one", "two", "three", "four"):
        tenants.say(tenants.alice, conversation)
    assert tenants.forgotten() == ["alice/one"]
    tenants.bench.kill(tenants.worker)
    tenants.worker = tenants.bench.worker(epoch=2)
    tenants.report()
    assert tenants.forgotten() == ["alice/one"], "the first had not come to it"
    rid = tenants.bench.rid()
    tenants.alice.send(m.List(rid=rid))
    assert len(tenants.alice.ok(rid)["agents"]) == 1
