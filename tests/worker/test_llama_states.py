"""Saving and restoring one sequence, and what happens when that goes wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chats import GREEDY, Chat, greedy, ids_of, prefill, some_ids
from gguf_models import Spec, make_model

from vram_conductor.protocol.errors import Internal
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import STATE_HEADER, LlamaPool

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

SPECS = [
    Spec(arch="llama"),
    Spec(arch="gemma3", n_layer=7, tied=False),
    Spec(arch="mamba"),
    Spec(arch="jamba"),
]
PROMPT = some_ids(70, 1)
OTHER = some_ids(50, 2)


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: str(spec.arch))
def model(engine: LlamaEngine, request: pytest.FixtureRequest) -> Iterator[LlamaModel]:
    model = engine.load(str(make_model(request.param)), request.param.arch)
    yield model
    model.close()


@pytest.fixture
def pool(model: LlamaModel) -> Iterator[LlamaPool]:
    pool = model.open_pool(PoolShape(512, 2))
    yield pool
    pool.close()


def blob_of(pool: LlamaPool, slot: int) -> bytearray:
    buffer = bytearray(pool.state_bytes(slot))
    assert pool.get_state(slot, memoryview(buffer)) == len(buffer)
    return buffer


def refuses(pool: LlamaPool, slot: int, blob: bytes) -> Internal:
    with pytest.raises(Internal) as caught:
        pool.set_state(slot, memoryview(blob))
    assert caught.value.reason == "state_failed"
    assert (pool.pos_min(slot), pool.pos_max(slot)) == (-1, -1)
    assert pool.state_bytes(slot) == 0
    return caught.value


def test_a_failed_restore_leaves_an_empty_slot_that_answers_like_a_fresh_one(
    model: LlamaModel, pool: LlamaPool
) -> None:
    expected = greedy(model, pool, 0, PROMPT, 20)
    pool.truncate(0, 0)
    prefill(pool, 0, PROMPT)
    whole = bytes(blob_of(pool, 0))
    neighbour = Chat(model.sampler(GREEDY, [], 0))
    neighbour.begin(pool, 1, OTHER)
    header = STATE_HEADER.size
    broken = {
        "cut by one byte": whole[:-1],
        "half": whole[: len(whole) // 2],
        "header only": whole[:header],
        "shorter than a header": whole[:3],
        "longer": whole + b"\0",
        "not ours": b"XXXX" + whole[4:],
        "llama.cpp's magic": whole[:header] + b"\0\0\0\0" + whole[header + 4 :],
        "no such cells": whole[: header + 12] + b"\xff\xff\xff\x7f" + whole[header + 16 :],
        "noise": whole[: header + 8] + bytes(range(256)) * 40,
    }
    for how, blob in broken.items():
        pool.truncate(0, 0)
        prefill(pool, 0, OTHER)
        refuses(pool, 0, blob)
        assert greedy(model, pool, 0, PROMPT, 20) == expected, how
    neighbour.run(pool, 1, 10)
    fresh = model.open_pool(PoolShape(256, 1))
    assert neighbour.out == greedy(model, fresh, 0, OTHER, 11)
    fresh.close()


def test_cells_at_negative_positions_do_not_survive_a_failed_restore(
    engine: LlamaEngine,
) -> None:
    """llama.cpp's removals begin at position 0, so such cells need more than a removal."""
    model = engine.load(str(make_model(SPECS[0])), "llama")
    pool = model.open_pool(PoolShape(256, 2))
    expected = greedy(model, pool, 0, PROMPT, 15)
    pool.truncate(0, 0)
    prefill(pool, 0, PROMPT)
    blob = blob_of(pool, 0)
    neighbour = Chat(model.sampler(GREEDY, [], 0))
    neighbour.begin(pool, 1, OTHER)
    first_position = STATE_HEADER.size + 16
    assert struct.unpack_from("<iI", blob, first_position) == (0, 1)
    struct.pack_into("<i", blob, first_position, -5)
    refuses(pool, 0, bytes(blob))
    refuses(pool, 0, bytes(blob[:-1]))
    assert greedy(model, pool, 0, PROMPT, 15) == expected
    neighbour.run(pool, 1, 9)
    alone = model.open_pool(PoolShape(256, 1))
    assert neighbour.out == greedy(model, alone, 0, OTHER, 10)
    alone.close()
    pool.close()
    model.close()


def test_empty_slots_save_and_restore_as_nothing(model: LlamaModel, pool: LlamaPool) -> None:
    assert pool.state_bytes(0) == 0
    buffer = bytearray(b"\xaa" * 64)
    assert pool.get_state(0, memoryview(buffer)) == 0
    assert buffer == b"\xaa" * 64
    pool.set_state(0, memoryview(b""))
    assert pool.pos_max(0) == -1
    prefill(pool, 0, PROMPT)
    pool.set_state(0, memoryview(b""))
    assert pool.pos_max(0) == -1


def test_the_size_is_asked_anew_after_every_decode(model: LlamaModel, pool: LlamaPool) -> None:
    prefill(pool, 0, PROMPT)
    for step in range(3):
        size = pool.state_bytes(0)
        short = bytearray(size - 1)
        with pytest.raises(Internal) as caught:
            pool.get_state(0, memoryview(short))
        assert caught.value.reason == "state_failed"
        assert caught.value.details == {"state_bytes": size, "buffer_bytes": size - 1}
        assert not any(short)
        roomy = bytearray(size + 100)
        assert pool.get_state(0, memoryview(roomy)) == size
        assert not any(roomy[size:])
        pool.decode([(0, ids_of(9), len(PROMPT) + step, True)])


def test_a_growing_conversation_has_a_growing_state(engine: LlamaEngine) -> None:
    model = engine.load(str(make_model(SPECS[0])), "llama")
    pool = model.open_pool(PoolShape(256, 1))
    prefill(pool, 0, PROMPT)
    sizes = [pool.state_bytes(0)]
    for step in range(4):
        pool.decode([(0, ids_of(9), len(PROMPT) + step, True)])
        sizes.append(pool.state_bytes(0))
    assert sizes == sorted(set(sizes))
    pool.close()
    model.close()


def test_read_only_buffers_can_be_restored(model: LlamaModel, pool: LlamaPool) -> None:
    prefill(pool, 0, PROMPT)
    blob = bytes(blob_of(pool, 0))
    pool.set_state(1, memoryview(blob).toreadonly())
    assert pool.pos_max(1) == len(PROMPT) - 1


def test_a_state_of_another_model_or_cache_type_is_refused(engine: LlamaEngine) -> None:
    one = engine.load(str(make_model(SPECS[0])), "one")
    other = engine.load(str(make_model(Spec(arch="llama", n_layer=3))), "other")
    pools = [
        one.open_pool(PoolShape(256, 1)),
        one.open_pool(PoolShape(256, 1, "q8_0")),
        other.open_pool(PoolShape(256, 1)),
    ]
    prefill(pools[0], 0, PROMPT)
    blob = bytes(blob_of(pools[0], 0))
    for pool in pools[1:]:
        refuses(pool, 0, blob)
    for pool in pools:
        pool.close()
    one.close()
    other.close()


def test_a_state_larger_than_the_pool_is_refused(engine: LlamaEngine) -> None:
    model = engine.load(str(make_model(SPECS[0])), "llama")
    large, small = model.open_pool(PoolShape(512, 1)), model.open_pool(PoolShape(256, 1))
    prefill(large, 0, some_ids(300, 3))
    refuses(small, 0, bytes(blob_of(large, 0)))
    assert len(greedy(model, small, 0, PROMPT, 5)) == 5
    large.close()
    small.close()
    model.close()


def test_a_state_does_not_cross_rope_regimes(engine: LlamaEngine) -> None:
    """Models with long and short rope factors choose by the size of the pool."""
    spec = Spec(arch="llama", n_ctx_train=4096, n_ctx_original=512)
    model = engine.load(str(make_model(spec)), "long")
    short, long = model.open_pool(PoolShape(512, 1)), model.open_pool(PoolShape(768, 1))
    prefill(short, 0, PROMPT)
    blob = bytes(blob_of(short, 0))
    assert "rope" in refuses(long, 0, blob).info.message
    same = model.open_pool(PoolShape(256, 1))
    same.set_state(0, memoryview(blob))
    for pool in (short, long, same):
        pool.close()
    model.close()
