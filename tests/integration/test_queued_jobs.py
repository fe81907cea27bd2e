"""Jobs that wait behind one that runs: whoever leaves or is cancelled takes nobody with him; and
what a running stream carries is whole."""

from __future__ import annotations

import random
import threading

import pytest
from gguf_models import Arch, Spec
from scene import WAIT_S, Scene, model, some_tokens, until

from vram_conductor.client import Conductor
from vram_conductor.protocol.status import JobStatus

OWN = Spec(vocab="bytes", seed=71)
WORDS = some_tokens(30, 5)
LONG = 700


def jobs(scene: Scene) -> list[JobStatus]:
    return [job for job in scene.conductor.status().jobs if job.agent == "busy"]


def versions(scene: Scene) -> dict[str, int]:
    return {talk.conversation: talk.version for talk in scene.agent("busy").conversations}


@pytest.mark.parametrize("how", ["cancelled", "client gone"])
def test_who_waits_leaves_without_touching_the_one_that_runs(scene: Scene, how: str) -> None:
    scene.conductor.register("busy", model(OWN), n_ctx=1024)
    alone = scene.run("busy", WORDS, conversation="alone", max_tokens=LONG).ids
    running = scene.start("busy", WORDS, max_tokens=LONG)
    next(running)
    done = scene.conductor.status().jobs_done
    with Conductor(scene.stage.endpoint, client="short") as short:
        # Behind it in the same conversation, and behind it for the only slot.
        waiting = [
            short.decode("busy", tokens=WORDS, conversation=name, max_tokens=4)
            for name in ("main", "second")
        ]
        until(lambda: len(jobs(scene)) == 3, "two jobs wait")
        if how == "cancelled":
            for reply in waiting:
                reply.cancel()
            for reply in waiting:
                usage = reply.result(WAIT_S).usage
                assert (usage.stop_reason, usage.generated_tokens) == ("cancelled", 0)
    # The session has ended: what it had asked for is not run any more.
    until(lambda: len(jobs(scene)) == 1, "they are gone")
    assert jobs(scene)[0].state == "running"
    assert running.result(WAIT_S).ids == alone
    # Nothing of them was run afterwards either.
    assert scene.run("busy", WORDS, conversation="next", max_tokens=2).ids
    found = versions(scene)
    assert (found["main"], found.get("second", 0)) == (1, 0)
    assert scene.conductor.status().jobs_done >= done + 2


@pytest.mark.parametrize("arch", ["llama", "mamba"])
def test_a_cancel_at_any_moment_leaves_a_right_record(
    scene: Scene, rng: random.Random, arch: Arch
) -> None:
    """Also at the very moment at which the worker begins."""
    scene.conductor.register("busy", model(Spec(vocab="bytes", arch=arch, seed=75)), n_ctx=4096)
    record: list[int] = []
    turns: list[tuple[list[int], list[int]]] = []
    generated: list[int] = []
    for turn in range(40):
        words = some_tokens(5, turn)
        reply = scene.start("busy", words, max_tokens=20)
        if turn % 4:
            threading.Event().wait(rng.choice([0, 0, 0.002, 0.005, 0.01, 0.02]))
        else:
            next(reply)
        reply.cancel()
        result = reply.result(WAIT_S)
        generated.append(result.usage.generated_tokens)
        assert len(result.ids) == generated[-1]
        if result.ids:
            turns.append((words, result.ids))
            record += [*words, *result.ids]
        told = scene.conductor.history("busy", ids=True).ids if record else []
        assert told == record
    assert 0 in generated, "some were cancelled before their first token"
    assert sum(count > 0 for count in generated) >= 10, "and some were not"
    # The KV is that of the record: computed in the same pieces (others round otherwise), it goes on
    # with the same tokens.
    for words, said in [*turns, (WORDS, scene.run("busy", WORDS, max_tokens=12).ids)]:
        again = scene.run("busy", words, conversation="undisturbed", max_tokens=len(said))
        assert again.ids == said


@pytest.mark.parametrize("text", ["éя", "€", "😀"])
def test_characters_that_are_split_over_tokens_arrive_whole(scene: Scene, text: str) -> None:
    scene.conductor.register("bytes", model(OWN), n_ctx=2048)
    first = 5  # the token of byte 0
    wanted = {first + byte for byte in text.encode()}
    bias = {token: -1000.0 for token in range(OWN.n_vocab) if token not in wanted}
    # Drawn almost evenly from the bytes of these characters: some of them meet in order.
    reply = scene.start(
        "bytes",
        WORDS,
        max_tokens=1500,
        logit_bias=bias,
        temperature=20.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=11,
    )
    pieces = list(reply)
    result = reply.result(WAIT_S)
    assert set(result.ids) == wanted
    whole = bytes(token - first for token in result.ids).decode("utf-8", errors="replace")
    assert "".join(pieces) == result.text == whole
    assert sum(letter in text for letter in whole) > 3, "characters of several tokens did occur"
    assert len(pieces) > 10


def test_each_agents_context_is_its_own_however_many_share_the_pool(scene: Scene) -> None:
    sizes = {"one": 512, "two": 512, "tiny": 256}
    for name, n_ctx in sizes.items():
        scene.conductor.register(name, model(OWN), n_ctx=n_ctx, slots=3)
    assert {name: scene.agent(name).n_ctx for name in sizes} == sizes
    replies = {name: scene.start(name, WORDS, max_tokens=None) for name in sizes}
    for name, reply in replies.items():
        usage = reply.result(WAIT_S).usage
        assert usage.stop_reason == "length"
        assert usage.prompt_tokens == len(WORDS)
        # All of it: the last token that is generated needs no cell.
        assert usage.prompt_tokens + usage.generated_tokens in (sizes[name], sizes[name] + 1)
        assert usage.reprefilled_tokens == 0
