"""kill -9 of the worker, of the broker, and of both, in the middle of answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gguf_models import Spec
from scene import MIB, NO_END, SMOL, WAIT_S, Scene, model, some_tokens, until

from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import ErrorInfo, Unavailable
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Credit, Decode
from vram_conductor.protocol.status import ConversationStatus
from vram_conductor.protocol.values import Sampling, Usage

FIRST, SECOND = Spec(vocab="bytes", n_ctx_train=16_384), Spec(vocab="bytes", seed=5)
LONG = 3000
"""More tokens than anybody waits for: what is killed is in the middle of them."""

COUNT = 600

WORDS = [some_tokens(60, seed) for seed in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def mortal() -> Iterator[Scene]:
    """Two agents with models of their own and one with a real model; room for everything."""
    with Scene(StageDevice(capacity_bytes=256 * MIB, host_cap_bytes=128 * MIB)) as scene:
        scene.conductor.register("a", model(FIRST), n_ctx=4096)
        scene.conductor.register("b", model(SECOND), n_ctx=4096)
        scene.conductor.register("real", SMOL, n_ctx=512)
        yield scene


class Talk:
    """A conversation whose turns are compared with those of one that nothing happened to."""

    def __init__(self, scene: Scene, agent: str, name: str, length: int = 60) -> None:
        self._scene, self._agent, self._name, self._length = scene, agent, name, length
        reference = f"{name}-reference"
        self._expected = [self._say(reference, turn).ids for turn in range(len(WORDS))]
        scene.conductor.reset(agent, reference)
        self.turns = 0

    def _say(self, name: str, turn: int) -> Result:
        return self._scene.run(
            self._agent, WORDS[turn][: self._length], conversation=name, max_tokens=4
        )

    def go_on(self) -> Usage:
        """The next turn."""
        found = self._say(self._name, self.turns)
        assert found.ids == self._expected[self.turns]
        self.turns += 1
        assert found.usage.state_version == self.turns
        return found.usage

    def adopted(self) -> None:
        """The next turn, of whose history nothing is computed again."""
        usage = self.go_on()
        length = (self.turns - 1) * (self._length + 4)
        assert (usage.reused_tokens, usage.reprefilled_tokens) == (length - 1, 0)
        assert usage.swap.restored

    def status(self) -> ConversationStatus:
        talks = self._scene.agent(self._agent).conversations
        return next(talk for talk in talks if talk.conversation == self._name)


def long_answer(scene: Scene, agent: str, name: str) -> Reply:
    """An answer that has begun and is far from its end."""
    reply = scene.start(agent, WORDS[0], conversation=name, max_tokens=LONG)
    next(reply)
    return reply


def in_the_middle(scene: Scene, jobs: int = 1) -> None:
    """Wait until so many jobs have generated some tokens; they have many more to go."""

    def generating() -> bool:
        seen = [job.generated_tokens for job in scene.conductor.status().jobs]
        return sum(tokens >= 40 for tokens in seen) == jobs

    until(generating, f"{jobs} jobs are in the middle of their answers")


def cut_off(reply: Reply, reason: str) -> ErrorInfo:
    """A reply of which something had been released ends with an error that says how much."""
    with pytest.raises(Unavailable) as caught:
        reply.result(WAIT_S)
    assert (caught.value.reason, caught.value.retryable) == (reason, True)
    assert 0 < len(reply.ids) < LONG
    return caught.value.info


def test_the_worker_dies(mortal: Scene) -> None:
    idle = [Talk(mortal, "a", "idle-1"), Talk(mortal, "b", "idle-1")]
    for talk in idle:
        talk.go_on()
    for agent in "ab":
        mortal.sealed(agent)
    unharmed = mortal.run("a", WORDS[0], conversation="unharmed-1", max_tokens=800).ids
    mortal.conductor.reset("a", "unharmed-1")
    before = mortal.books()
    broker = mortal.broker_pid()

    seen = long_answer(mortal, "a", "seen-1")
    in_the_middle(mortal)
    mortal.kill_worker()
    error = cut_off(seen, "worker_lost")
    # All that was released is right, and in the record: the conversation can go on from there.
    assert seen.ids[:800] == unharmed[: len(seen.ids)]
    assert error.details["generated_tokens"] >= len(seen.ids)
    for talk in idle:
        talk.adopted()
    again = mortal.run("a", WORDS[1], conversation="seen-1", max_tokens=4)
    assert again.usage.state_version == 2
    kept = len(WORDS[0]) + error.details["generated_tokens"]
    assert again.usage.prompt_tokens == kept + len(WORDS[1])
    # What had no checkpoint yet was computed again, and that is said.
    assert again.usage.reprefilled_tokens == kept - 1
    assert again.usage.reprefill_reason
    assert mortal.broker_pid() == broker
    until(lambda: mortal.books().promised == before.promised, "the ledger is as before")


def test_the_worker_dies_before_anybody_saw_a_token(mortal: Scene) -> None:
    expected = mortal.run("b", WORDS[1], conversation="unseen-0", max_tokens=COUNT)
    client, rid = mortal.raw(), new_rid()
    client.send(
        Decode(
            rid=rid,
            agent="b",
            conversation="unseen-1",
            tokens=WORDS[1],
            max_tokens=COUNT,
            sampling=Sampling(temperature=0),
            logit_bias=list(NO_END.items()),
            return_ids=True,
            window=0,
        )
    )
    in_the_middle(mortal)
    mortal.kill_worker()
    again = until(
        lambda: [job.attempt for job in mortal.conductor.status().jobs if job.attempt > 1],
        "the next worker has the job",
    )
    assert again == [2]
    client.send(Credit(rid=rid, ack=0, upto=10_000))
    pieces, end = client.result(rid)
    assert isinstance(end, Usage), end
    assert [token for piece in pieces for token in piece.ids] == expected.ids
    assert "".join(piece.text for piece in pieces) == expected.text
    assert end.state_version == 1


def test_the_broker_dies(mortal: Scene) -> None:
    idle = [Talk(mortal, "a", "idle-2"), Talk(mortal, "real", "idle-2", length=12)]
    for talk in idle:
        talk.go_on()
    before, epoch = mortal.calm_books(), mortal.conductor.broker_epoch
    worker = mortal.worker_pid()

    running = long_answer(mortal, "b", "seen-2")
    in_the_middle(mortal)
    mortal.kill_broker()
    cut_off(running, "broker_restarted")
    assert mortal.conductor.broker_epoch > epoch
    assert mortal.worker_pid() == worker, "the worker has survived"
    until(lambda: mortal.books() == before, "agents, promises and what is loaded are as before")
    for talk in idle:
        assert (talk.status().version, talk.status().where) != (0, "absent")
        # Its KV never left: nothing was restored, nothing was computed again.
        assert talk.go_on().reprefilled_tokens == 0
    until(lambda: not mortal.conductor.status().jobs, "the answer was stopped")
    assert mortal.run("b", WORDS[1], conversation="seen-2", max_tokens=4).ids


def test_both_die(mortal: Scene) -> None:
    idle = [Talk(mortal, "b", "idle-3"), Talk(mortal, "real", "idle-3", length=12)]
    for talk in idle:
        talk.go_on()
    for agent in ("b", "real"):
        mortal.sealed(agent)
    before = mortal.books()

    running = long_answer(mortal, "a", "seen-3")
    in_the_middle(mortal)
    mortal.kill_broker()
    worker = mortal.stage.supervisor.children[1].process
    assert worker is not None
    worker.kill()
    cut_off(running, "broker_restarted")
    until(lambda: mortal.books().agents == before.agents, "the agents are back")
    until(lambda: mortal.books().promised == before.promised, "and their promises")
    for talk in idle:
        talk.adopted()
    assert mortal.run("a", WORDS[1], conversation="seen-3", max_tokens=4).ids


@pytest.mark.parametrize("who", ["worker", "broker"])
def test_death_in_the_middle_of_a_registration(
    mortal: Scene, smollm2: Path, tmp_path: Path, who: str
) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copy(smollm2, path)  # another file is another model: it has to be loaded
    before = mortal.books()
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(mortal.conductor.register, "late", str(path), n_ctx=256)
        until(
            lambda: len(mortal.books().promised) > len(before.promised) or admitted.done(),
            "its bytes are reserved",
        )
        if who == "worker":
            mortal.kill_worker()
        else:
            mortal.kill_broker()
        # The request is made again; the client's patience is for that.
        assert admitted.result(WAIT_S).info is not None
    until(lambda: mortal.agent("late").state == "ready", "it is there")
    keys = [line.key for line in mortal.books().promised]
    assert len(keys) == len(set(keys))
    assert mortal.run("late", WORDS[0][:5], max_tokens=2).ids
    mortal.conductor.unregister("late")
    until(lambda: mortal.books().agents == before.agents, "the agents are as before")
    until(lambda: mortal.books().promised == before.promised, "the ledger is as before")
