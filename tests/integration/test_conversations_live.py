"""Copies of conversations and their history on the whole product: a copy says what its original
would have said, and afterwards they share nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from gguf_models import Spec, make_model
from scene import CHATTY, MIB, NO_END, PLAIN, Scene, model, refusal, some_tokens, until

from vram_conductor.client import AsyncConductor
from vram_conductor.client.probing import estimates
from vram_conductor.client.reply import Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import Code
from vram_conductor.protocol.values import KVType

ROLLBACK = ["llama", "gemma3", "mamba", "jamba"]
"""Full attention, a sliding window, recurrent, both."""


def say(scene: Scene, seed: int, conversation: str = "main", agent: str = "forker") -> Result:
    return scene.run(agent, some_tokens(7, seed), conversation=conversation, max_tokens=5)


def unbroken(result: Result) -> bool:
    return result.usage.reprefilled_tokens == 0


def start(scene: Scene, path: str = "", **options: object) -> None:
    scene.conductor.register("forker", path or model(), n_ctx=256, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("arch", ROLLBACK)
def test_a_copy_says_what_its_original_says_and_each_goes_its_own_way(
    scene: Scene, arch: str, kv_type: KVType
) -> None:
    spec = Spec(arch=arch, n_layer=7, tied=False) if arch == "gemma3" else Spec(arch=arch)  # type: ignore[arg-type]
    start(scene, str(make_model(spec)), kv_type=kv_type)
    for seed in range(3):
        say(scene, seed)
    made = scene.conductor.fork("forker", "side")
    assert (made.kv, made.reason, made.source_version) == ("copied", "", 3)
    assert (made.tokens, made.kv_bytes > 0) == (36, True)
    assert made.kv_tokens in (made.tokens, made.tokens - 1)

    one, other = say(scene, 9), say(scene, 9, "side")
    assert one.ids == other.ids
    assert unbroken(one)
    assert unbroken(other)
    assert other.usage.swap.restored
    assert other.usage.reused_tokens >= made.tokens - 1
    for seed in range(10, 14):
        mine = [say(scene, seed), say(scene, seed + 50, "side")]
        assert all(map(unbroken, mine))
    # What each of them has is what it was told, and what it said.
    main = scene.conductor.history("forker", ids=True)
    side = scene.conductor.history("forker", "side", ids=True)
    assert main.ids is not None
    assert side.ids is not None
    assert main.ids[:48] == side.ids[:48]
    assert main.ids[48:] != side.ids[48:]
    assert (main.version, side.version) == (8, 6)


def test_a_copy_of_a_chat_answers_as_its_original(scene: Scene, smollm2: Path) -> None:
    scene.conductor.register("forker", str(smollm2), n_ctx=512, temperature=0)
    agent = scene.conductor.agent("forker")
    first = agent.chat("Name a colour.", max_tokens=8, logit_bias=NO_END).result()
    agent.fork("side")
    answers = [
        agent.chat("And another?", conversation=name, max_tokens=12, return_ids=True).result()
        for name in ("main", "side")
    ]
    assert answers[0].ids == answers[1].ids
    assert all(map(unbroken, answers))
    told = agent.history("side", ids=True)
    assert [(turn.role, turn.text) for turn in told.turns] == [
        ("user", "Name a colour."),
        ("assistant", first.text),
        ("user", "And another?"),
        ("assistant", answers[1].text),
    ]
    assert told.turns[-1].end == told.tokens == len(told.ids or [])
    assert told.is_whole


def test_a_copy_of_what_runs_is_of_what_was_said_before(scene: Scene) -> None:
    scene.conductor.register("forker", model(Spec(vocab="bytes", seed=170)), n_ctx=4096)
    before = say(scene, 1)
    running = scene.start("forker", some_tokens(7, 2), max_tokens=4000)
    next(running)
    made = scene.conductor.fork("forker", "side")
    assert (made.tokens, made.source_version) == (12, 1)
    assert scene.conductor.history("forker").version == 1
    running.cancel()
    assert running.result().usage.state_version == 2
    assert scene.conductor.history("forker").tokens > 12
    assert scene.conductor.history("forker", "side", ids=True).ids == [
        *some_tokens(7, 1),
        *(before.ids or []),
    ]
    assert unbroken(say(scene, 2, "side"))


def test_where_there_is_no_room_the_receipts_say_so() -> None:
    sizes = estimates([make_model(PLAIN)], 256, "f16")[0]
    state = sizes["state_bytes"]
    device = StageDevice(capacity_bytes=64 * MIB, host_cap_bytes=2 * state + 256 * 1024)
    with Scene(device) as scene:
        start(scene)
        scene.run("forker", some_tokens(200, 1), max_tokens=4)
        made = [scene.conductor.fork("forker", f"c{number}") for number in range(3)]
        last = made[-1]
        assert (last.kv, last.kv_tokens, last.tokens) == ("absent", 0, 204)
        assert last.reason == "not_copied: arena_full"
        answer = say(scene, 3, "c2")
        assert answer.usage.reprefill_reason == "not_copied: arena_full"
        assert answer.usage.reprefilled_tokens == 203
        assert answer.ids == say(scene, 3).ids


def test_copies_and_what_was_said_survive_broker_and_worker() -> None:
    with Scene(StageDevice(capacity_bytes=64 * MIB, host_cap_bytes=64 * MIB)) as scene:
        scene.conductor.register("forker", model(CHATTY), n_ctx=256, temperature=0)
        agent = scene.conductor.agent("forker")
        agent.chat("hello", max_tokens=4, logit_bias=NO_END).result()
        agent.fork("side")
        before = agent.history("side", ids=True)
        scene.sealed("forker")
        epoch = scene.conductor.broker_epoch
        scene.kill_broker()
        until(lambda: scene.conductor.ping() and scene.conductor.broker_epoch != epoch, "a broker")
        scene.kill_worker()
        assert agent.history("side", ids=True) == before
        assert agent.history().turns == before.turns
        said = [
            agent.chat("more", conversation=name, max_tokens=4, return_ids=True).result()
            for name in ("main", "side")
        ]
        assert said[0].ids == said[1].ids
        assert all(map(unbroken, said))


def test_refusals_are_typed_and_change_nothing(scene: Scene) -> None:
    start(scene)
    say(scene, 1)
    conductor = scene.conductor
    conductor.fork("forker", "side")
    for call, code, reason in (
        (lambda: conductor.fork("forker", "side"), Code.ALREADY_EXISTS, "conversation_exists"),
        (lambda: conductor.fork("forker", "a/b"), Code.INVALID_ARGUMENT, "bad_name"),
        (lambda: conductor.fork("forker", "x" * 65), Code.OUT_OF_RANGE, "limit_exceeded"),
        (lambda: conductor.fork("nobody", "x"), Code.NOT_FOUND, "no_such_agent"),
        (
            lambda: conductor.fork("forker", "x", conversation="nowhere"),
            Code.NOT_FOUND,
            "no_such_conversation",
        ),
        (
            lambda: conductor.fork("forker", "x", expect_version=7),
            Code.ABORTED,
            "version_mismatch",
        ),
        (lambda: conductor.history("forker", "nowhere"), Code.NOT_FOUND, "no_such_conversation"),
        (lambda: conductor.history("bystander", "side"), Code.NOT_FOUND, "no_such_conversation"),
    ):
        info = refusal(call)
        assert (info.code, info.reason) == (code, reason)
    assert [item.conversation for item in scene.agent("forker").conversations] == ["main", "side"]
    conductor.forget("forker", "side")
    assert refusal(lambda: conductor.history("forker", "side")).reason == "no_such_conversation"
    assert len(scene.agent("forker").conversations) == 1


def test_there_are_only_so_many(scene: Scene) -> None:
    start(scene)
    say(scene, 1)
    for number in range(limits.CONVERSATIONS_PER_AGENT_MAX - 1):
        scene.conductor.fork("forker", f"c{number}")
    info = refusal(lambda: scene.conductor.fork("forker", "one-more"))
    assert (info.code, info.reason) == (Code.RESOURCE_EXHAUSTED, "too_many_conversations")
    refused = refusal(lambda: scene.run("forker", [300], conversation="new", max_tokens=1))
    assert refused.reason == "too_many_conversations"
    assert unbroken(say(scene, 2, "c254"))
    scene.conductor.forget("forker", "c0")
    assert scene.conductor.fork("forker", "one-more").tokens == 12


def test_the_asyncio_client_does_the_same(scene: Scene) -> None:
    start(scene)
    say(scene, 1)

    async def both() -> None:
        async with AsyncConductor(scene.stage.endpoint) as conductor:
            agent = conductor.agent("forker")
            made = await agent.fork("side", expect_version=1)
            assert (made.kv, made.tokens) == ("copied", 12)
            told = await agent.history("side", ids=True)
            assert told == scene.conductor.history("forker", "side", ids=True)
            assert await agent.reset("side") == 2
            await agent.forget("side")
            assert [item.conversation for item in scene.agent("forker").conversations] == ["main"]

    asyncio.run(both())
