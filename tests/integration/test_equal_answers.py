"""The product's promise from end to end: agents of two models take turns on a device that has room
for the pool of one, and say the very tokens that they say when nobody else is there.

A recurrent model (mamba) has a state and no KV cache: there is nothing that ``kv_type`` could
quantise, and its ``q8_0`` pool has the size of its ``f16`` one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from gguf_models import Spec, make_model
from scene import MIB, NO_END, Scene, some_tokens, until

from vram_conductor.client.probing import estimates
from vram_conductor.client.reply import Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.values import KVType

TURNS = 11
"""Of each agent: two agents in turn make 21 switches."""

MAX_TOKENS = 3
BIAS = {**NO_END, 1: -1000.0, 106: -1000.0}
"""No end tokens: Gemma's are 1 and 106."""

STORY = "The keeper wrote down every ship that passed, its flag, its course and the hour. "
WINDOW = 512
ROLLBACK = {"smollm2": "any", "gemma3": "window", "mamba": "none", "jamba": "none"}
"""How far a state can be rolled back: a limit of the model, which its agents are told."""


@dataclass(frozen=True)
class Speaker:
    """An agent: its model, its first prompt, and what is appended in the later turns."""

    name: str
    path: Path
    n_ctx: int
    first: str | list[int]
    later: list[str | list[int]]


def real(name: str, path: Path, n_ctx: int, first: str) -> Speaker:
    words = ["Then", " At noon", " Nobody", " But", " The sea", " In May", " He", " Later", " Once"]
    return Speaker(name, path, n_ctx, first, [words[turn % 9] for turn in range(1, TURNS)])


def random(spec: Spec, n_ctx: int) -> Speaker:
    later: list[str | list[int]] = [some_tokens(2, 100 + turn) for turn in range(1, TURNS)]
    return Speaker(spec.arch, make_model(spec), n_ctx, some_tokens(90, 7), later)


@contextmanager
def room_for_one(speakers: list[Speaker], kv_type: KVType) -> Generator[Scene]:
    """A system that holds all weights and the larger pool, and both agents on it."""
    sizes = [estimates([one.path], one.n_ctx, kv_type)[0] for one in speakers]
    pools = [size["pool_bytes"] for size in sizes]
    slack = min(pools) // 4
    capacity = sum(size["weights_bytes"] for size in sizes) + max(pools) + slack
    assert capacity < sum(size["weights_bytes"] for size in sizes) + sum(pools)
    with Scene(StageDevice(capacity_bytes=capacity, host_cap_bytes=96 * MIB)) as scene:
        for one in speakers:
            name = str(one.path)
            scene.conductor.register(one.name, name, n_ctx=one.n_ctx, kv_type=kv_type)
            assert scene.agent(one.name).rollback == ROLLBACK[one.name]
        yield scene


def say(scene: Scene, speaker: Speaker, turn: int, conversation: str) -> Result:
    words = speaker.later[turn - 1] if turn else speaker.first
    return scene.run(
        speaker.name, words, conversation=conversation, max_tokens=MAX_TOKENS, logit_bias=BIAS
    )


def alone(scene: Scene, speaker: Speaker) -> list[list[int]]:
    """What it says in a conversation whose KV never moves."""
    found = [say(scene, speaker, turn, "alone") for turn in range(TURNS)]
    for result in found[1:]:
        swap = result.usage.swap
        assert (swap.evicted, swap.restored, swap.bytes) == ([], False, 0)
        assert result.usage.reprefilled_tokens == 0
    scene.conductor.reset(speaker.name, "alone")
    return [result.ids for result in found]


def check(speakers: list[Speaker], kv_type: KVType) -> dict[str, int]:
    """Returns the lengths of the first prompts in tokens, by name."""
    with room_for_one(speakers, kv_type) as scene:
        expected = {one.name: alone(scene, one) for one in speakers}
        for answers in expected.values():
            said = [token for answer in answers for token in answer]
            assert len(said) == TURNS * MAX_TOKENS
            assert len(set(said)) > 5, "a model that repeats itself proves nothing"
        before, switches = scene.device().swaps, 0
        firsts: dict[str, int] = {}
        lengths: dict[str, int] = {}
        for turn in range(TURNS):
            for one in speakers:
                result = say(scene, one, turn, "main")
                assert result.ids == expected[one.name][turn], (one.name, turn)
                usage = result.usage
                assert (usage.reprefilled_tokens, usage.reprefill_reason) == (0, "")
                # The other's pool had to leave; what was parked came back, all but the last token.
                switches += any(key.startswith("pool:") for key in usage.swap.evicted)
                if turn:
                    assert usage.swap.restored
                    assert usage.reused_tokens == lengths[one.name] - 1
                firsts.setdefault(one.name, usage.prompt_tokens)
                lengths[one.name] = usage.prompt_tokens + usage.generated_tokens
        assert switches >= 20
        # What STATUS shows is the worker's last report, which may be older than the last answer.
        until(lambda: scene.device().swaps - before >= 20, "STATUS counts the moves")
        return firsts


@pytest.mark.real
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_full_attention_and_a_sliding_window(smollm2: Path, gemma3: Path, kv_type: KVType) -> None:
    speakers = [
        real("smollm2", smollm2, 512, "A log of the lighthouse. " + STORY),
        real("gemma3", gemma3, 768, "A log of the lighthouse. " + STORY * 29),
    ]
    firsts = check(speakers, kv_type)
    assert firsts["gemma3"] > WINDOW


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_recurrent_and_hybrid(kv_type: KVType) -> None:
    speakers = [random(Spec(arch="mamba"), 512), random(Spec(arch="jamba"), 1024)]
    check(speakers, kv_type)


def test_a_recurrent_model_has_nothing_to_quantise() -> None:
    path = make_model(Spec(arch="mamba"))
    plain, quantised = (estimates([path], 512, kv_type)[0] for kv_type in ("f16", "q8_0"))
    assert plain["pool_bytes"] == quantised["pool_bytes"]
    assert plain["state_bytes"] == quantised["state_bytes"]
