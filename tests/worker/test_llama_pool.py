"""One llama_context: batches, a full cache, rollback."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from chats import GREEDY, Chat, greedy, ids_of, prefill, some_ids
from gguf_models import Spec, make_model
from llama_cpp import llama_cpp as ll

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import PoolShape, Sampling
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import LlamaPool
from vram_conductor.worker.llama.sampler import largest

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

LLAMA = Spec(arch="llama")
GEMMA = Spec(arch="gemma3", n_layer=7, tied=False)


@pytest.fixture(scope="module")
def llama(engine: LlamaEngine) -> Iterator[LlamaModel]:
    model = engine.load(str(make_model(LLAMA)), "llama")
    yield model
    model.close()


@pytest.fixture(scope="module")
def gemma(engine: LlamaEngine) -> Iterator[LlamaModel]:
    model = engine.load(str(make_model(GEMMA)), "gemma")
    yield model
    model.close()


@pytest.fixture
def pool(llama: LlamaModel) -> Iterator[LlamaPool]:
    pool = llama.open_pool(PoolShape(256, 2))
    yield pool
    pool.close()


def test_the_largest_logit_is_what_llama_cpp_takes(llama: LlamaModel, pool: LlamaPool) -> None:
    """With a bias that changes nothing llama.cpp's own chain samples."""
    quick, chain = llama.sampler(GREEDY, [], 0), llama.sampler(GREEDY, [(0, -1e9)], 0)
    prompt = some_ids(9, 3)
    prefill(pool, 0, prompt)
    for at in range(9, 60):
        token = pool.sample(0, quick)
        assert pool.sample(0, chain) == token
        pool.decode([(0, np.array([token], np.int32), at, True)])
    logits = (ctypes.c_float * 5)(1.0, 3.0, 2.0, 3.0, -math.inf)
    pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
    assert largest(pointer, 5) == 1, "the first of several"
    logits[2] = math.nan
    assert largest(pointer, 5) == 2


def test_slots_of_one_batch_get_their_own_logits(llama: LlamaModel, pool: LlamaPool) -> None:
    prompts = [some_ids(9, 1), some_ids(14, 2)]
    alone: list[list[int]] = []
    for prompt in prompts:
        other = llama.open_pool(PoolShape(256, 1))
        alone.append(greedy(llama, other, 0, prompt, 12))
        other.close()
    sampler = llama.sampler(GREEDY, [], 0)
    # In the reverse order of the slots, and the second prompt in two parts.
    pool.decode([(1, prompts[1][:3], 0, False)])
    pool.decode([(1, prompts[1][3:], 3, True), (0, prompts[0], 0, True)])
    outs = [[pool.sample(slot, sampler)] for slot in (0, 1)]
    for step in range(11):
        order = (0, 1) if step % 2 else (1, 0)
        pool.decode(
            [(slot, ids_of(outs[slot][-1]), len(prompts[slot]) + step, True) for slot in order]
        )
        for slot in (1, 0):
            outs[slot].append(pool.sample(slot, sampler))
    sampler.close()
    assert outs == alone


@pytest.mark.parametrize(
    "batch",
    [
        [],
        [(0, some_ids(65, 1), 0, True)],
        [(0, some_ids(2, 1), 0, True), (1, some_ids(2, 1), 0, True), (1, ids_of(9), 2, True)],
        [(0, ids_of(320), 0, True)],
        [(0, ids_of(-1), 0, True)],
    ],
    ids=["empty", "too long", "too many outputs", "no such token", "negative token"],
)
def test_what_llama_cpp_would_abort_on_is_an_error(
    llama: LlamaModel,
    pool: LlamaPool,
    batch: list[tuple[int, Tokens, int, bool]],
) -> None:
    with pytest.raises(Internal) as caught:
        pool.decode(batch)
    assert caught.value.reason == "decode_failed"
    assert pool.pos_max(0) == -1
    assert greedy(llama, pool, 0, some_ids(5, 3), 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)])
def test_logits_that_are_no_numbers_are_noticed(
    llama: LlamaModel, pool: LlamaPool, sampling: Sampling, value: float
) -> None:
    sampler = llama.sampler(sampling, [], 3)
    pool.decode([(0, some_ids(5, 1), 0, True)])
    logits = ll.llama_get_logits_ith(pool._context, 4)
    for token in range(llama.info.n_vocab):
        logits[token] = value
    with pytest.raises(Internal) as caught:
        pool.sample(0, sampler)
    assert caught.value.reason == "bad_logits"
    sampler.close()


def test_a_full_pool_says_so_and_changes_nothing(llama: LlamaModel, pool: LlamaPool) -> None:
    chat = Chat(llama.sampler(GREEDY, [], 0))
    chat.begin(pool, 0, some_ids(40, 1))
    prefill(pool, 1, some_ids(214, 2))
    with pytest.raises(ResourceExhausted) as caught:
        pool.decode([(1, some_ids(10, 3), 214, True)])
    assert caught.value.reason == "kv_full"
    assert caught.value.details["cells"] == 256
    assert (pool.pos_max(0), pool.pos_max(1)) == (39, 213)
    # The other conversation goes on as if nothing had been: two cells are left, then room.
    chat.run(pool, 0, 2)
    assert pool.truncate(1, 0)
    chat.run(pool, 0, 10)
    fresh = llama.open_pool(PoolShape(256, 1))
    assert chat.out == greedy(llama, fresh, 0, some_ids(40, 1), 13)
    fresh.close()


def test_full_attention_rolls_back_to_anywhere(llama: LlamaModel, pool: LlamaPool) -> None:
    ids = some_ids(100, 4)
    expected = greedy(llama, pool, 1, ids, 20)
    assert pool.truncate(1, 0)
    prefill(pool, 0, np.concatenate([ids[:60], some_ids(30, 5)]))
    assert pool.truncate(0, 60)
    assert pool.pos_max(0) == 59
    chat = Chat(llama.sampler(GREEDY, [], 0), position=100)
    prefill(pool, 0, ids[60:], first=60)
    chat.out = [pool.sample(0, chat.sampler)]
    chat.run(pool, 0, 19)
    assert chat.out == expected


def test_truncating_beyond_the_end_or_an_empty_slot_is_nothing(pool: LlamaPool) -> None:
    assert pool.truncate(0, 0)
    assert pool.truncate(0, 5)
    prefill(pool, 0, some_ids(7, 1))
    assert pool.truncate(0, 7)
    assert pool.truncate(0, 99)
    assert pool.pos_max(0) == 6


def test_a_window_rolls_back_only_as_far_as_it_still_reaches(gemma: LlamaModel) -> None:
    ids = some_ids(100, 6)
    pool = gemma.open_pool(PoolShape(256, 1))
    expected = greedy(gemma, pool, 0, ids, 25)
    # A resumed state holds exactly the window: one token less can still be computed, two not.
    pool.truncate(0, 0)
    prefill(pool, 0, np.concatenate([ids[:99], ids_of(9)]))
    chat = Chat(gemma.sampler(GREEDY, [], 0), position=100)
    chat.park(pool, 0)
    chat.resume(pool, 0)
    assert pool.pos_min(0) == 100 - GEMMA.n_swa
    size = pool.state_bytes(0)
    assert not pool.truncate(0, 98)
    assert (pool.pos_max(0), pool.state_bytes(0)) == (99, size)
    assert pool.truncate(0, 99)
    prefill(pool, 0, ids[99:], first=99)
    chat.out = [pool.sample(0, chat.sampler)]
    chat.run(pool, 0, 24)
    assert chat.out == expected
    pool.close()


def test_a_young_window_conversation_rolls_back_to_its_start(gemma: LlamaModel) -> None:
    pool = gemma.open_pool(PoolShape(256, 1))
    ids = some_ids(20, 7)
    expected = greedy(gemma, pool, 0, ids, 10)
    pool.truncate(0, 0)
    prefill(pool, 0, np.concatenate([ids[:3], some_ids(9, 8)]))
    assert pool.truncate(0, 3)
    chat = Chat(gemma.sampler(GREEDY, [], 0), position=20)
    prefill(pool, 0, ids[3:], first=3)
    chat.out = [pool.sample(0, chat.sampler)]
    chat.run(pool, 0, 9)
    assert chat.out == expected
    pool.close()


@pytest.mark.parametrize("arch", ["mamba", "jamba", "lfm2"])
def test_recurrent_state_rolls_back_only_to_nothing(engine: LlamaEngine, arch: str) -> None:
    spec = Spec(arch=arch)  # type: ignore[arg-type]
    model = engine.load(str(make_model(spec)), arch)
    pool = model.open_pool(PoolShape(256, 1))
    ids = some_ids(30, 9)
    expected = greedy(model, pool, 0, ids, 12)
    pool.truncate(0, 0)
    chat = Chat(model.sampler(GREEDY, [], 0))
    chat.begin(pool, 0, ids)
    assert not pool.truncate(0, 29)
    assert not pool.truncate(0, 1)
    assert pool.pos_max(0) == 29
    chat.run(pool, 0, 11)
    assert chat.out == expected
    assert pool.truncate(0, 0)
    assert pool.pos_max(0) == -1
    assert greedy(model, pool, 0, ids, 12) == expected
    pool.close()
    model.close()


def test_closing_twice_is_harmless(llama: LlamaModel) -> None:
    pool = llama.open_pool(PoolShape(256, 1))
    pool.close()
    pool.close()


def test_a_pool_that_does_not_fit_is_a_typed_error_and_leaves_nothing() -> None:
    """In a process of its own, whose address space is too small for the cache."""
    script = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from chats import greedy, some_ids
        from vram_conductor.protocol.errors import ResourceExhausted
        from vram_conductor.protocol.values import PoolShape
        from vram_conductor.worker.llama.model import LlamaModel
        from vram_conductor.worker.llama.options import EngineOptions
        model = LlamaModel({str(make_model(LLAMA))!r}, "tiny", EngineOptions(threads=1))
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
        for _ in range(5):
            try:
                model.open_pool(PoolShape(1 << 21, 1))
            except ResourceExhausted as error:
                assert error.reason == "pool_failed", error
                assert error.details["cells"] == 1 << 21
                assert error.retryable
            else:
                raise SystemExit("it fitted")
        pool = model.open_pool(PoolShape(256, 1))
        assert len(greedy(model, pool, 0, some_ids(5, 1), 5)) == 5
        print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "fine\n", done.stderr
