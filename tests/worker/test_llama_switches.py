"""The product's promise on real llama.cpp: greedy tokens of conversations that take turns in one
slot, parked and resumed at every turn, equal those of conversations that never moved."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chats import GREEDY, Chat, greedy, some_ids
from gguf_models import Spec, make_model

from vram_conductor.protocol.values import KVType, PoolShape
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import LlamaPool

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

STORY = (
    "The lighthouse keeper wrote down every ship that passed, its flag, its course and the hour. "
    "In the winter of the long storm nobody passed for eleven days, and he wrote that down too. "
)
TURNS = 24
TOKENS_PER_TURN = 2
SHAPES = [(1, 1), (3, 2), (1, 2), (2, 1)]
"""Slots and size (in multiples of the smallest) of the pool, a new one every few turns."""


def interleave(
    model: LlamaModel, prompts: list[Tokens], cells: int, kv_type: KVType, *, reopen: bool
) -> list[list[int]]:
    """Conversations in turn, one slot, parked and resumed at each turn."""
    chats = [Chat(model.sampler(GREEDY, [], 0)) for _ in prompts]
    pool = model.open_pool(PoolShape(cells, 1, kv_type))
    slot = 0
    for chat, prompt in zip(chats, prompts, strict=True):
        pool.truncate(slot, 0)
        chat.begin(pool, slot, prompt)
        chat.park(pool, slot)
    shapes = itertools.cycle(SHAPES)
    for turn in range(TURNS):
        if reopen and turn % 6 == 5:
            pool.close()
            slots, size = next(shapes)
            pool = model.open_pool(PoolShape(cells * size, slots, kv_type))
            slot = slots - 1
        for chat in chats:
            chat.resume(pool, slot)
            chat.run(pool, slot, TOKENS_PER_TURN)
            chat.park(pool, slot)
    pool.close()
    for chat in chats:
        chat.sampler.close()
    return [chat.out for chat in chats]


def stay(model: LlamaModel, prompts: list[Tokens], cells: int, kv_type: KVType) -> list[list[int]]:
    """The same conversations, each in a pool of its own from beginning to end."""
    outs: list[list[int]] = []
    for prompt in prompts:
        pool: LlamaPool = model.open_pool(PoolShape(cells, 1, kv_type))
        outs.append(greedy(model, pool, 0, prompt, 1 + TURNS * TOKENS_PER_TURN))
        pool.close()
    return outs


def check(
    model: LlamaModel,
    prompts: list[Tokens],
    cells: int,
    kv_type: KVType,
    *,
    reopen: tuple[bool, ...] = (False, True),
) -> None:
    expected = stay(model, prompts, cells, kv_type)
    assert all(len(set(out)) > 3 for out in expected), "a model that repeats itself proves nothing"
    assert len({tuple(out) for out in expected}) == len(expected)
    for how in reopen:
        assert interleave(model, prompts, cells, kv_type, reopen=how) == expected


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "spec",
    [
        Spec(arch="llama"),
        Spec(arch="gemma3", n_layer=7, tied=False),
        Spec(arch="mamba"),
        Spec(arch="jamba"),
        Spec(arch="lfm2"),
    ],
    ids=lambda spec: spec.arch,
)
def test_random_models(engine: LlamaEngine, spec: Spec, kv_type: KVType) -> None:
    model = engine.load(str(make_model(spec)), spec.arch)
    # 90 tokens are far past the window of 32 of the sliding-window model.
    check(model, [some_ids(90, seed) for seed in (1, 2, 3)], 256, kv_type)
    model.close()


@pytest.mark.real
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_full_attention(engine: LlamaEngine, smollm2: Path, kv_type: KVType) -> None:
    model = engine.load(str(smollm2), "smollm2")
    prompts = [model.tokenize(text, first=True) for text in (STORY, "Once upon a time, " + STORY)]
    check(model, prompts, 512, kv_type, reopen=(True,))
    model.close()


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_sliding_window_past_its_window(engine: LlamaEngine, gemma3: Path, kv_type: KVType) -> None:
    model = engine.load(str(gemma3), "gemma3")
    prompts = [model.tokenize(text + STORY * 15, first=True) for text in ("Log. ", "A tale. ")]
    assert all(len(prompt) > 512 + TURNS for prompt in prompts)
    check(model, prompts, 768, kv_type, reopen=(True,))
    model.close()
