"""Sleeping pools and weights on real llama.cpp, over a library that only keeps the books."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest
from chats import GREEDY, Chat, greedy, some_ids
from gguf_models import Spec, make_model
from llama_cpp import llama_cpp as ll
from vmm_books import Books

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama.engine import choose_mechanism
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.vmm.library import Vmm

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

SHAPE = PoolShape(256, 2)


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def model(engine: LlamaEngine, books: Books) -> Iterator[LlamaModel]:
    path = str(make_model(Spec()))
    model = LlamaModel(path, "llama", engine.options, None, cast("Vmm", books))
    yield model
    model.close()


def test_tokens_are_the_same_after_any_number_of_sleeps(model: LlamaModel, books: Books) -> None:
    prompt = some_ids(40, 1)
    still = model.open_pool(SHAPE)
    expected = greedy(model, still, 0, prompt, 13)
    still.close()
    pool = model.open_pool(SHAPE)
    chat = Chat(model.sampler(GREEDY, [], 0))
    model.back_up()
    chat.begin(pool, 0, prompt)
    for turn in range(4):
        chat.park(pool, turn % 2)
        model.sleep()
        pool.sleep()
        assert all(books.asleep[tag] for tag in books.inside[:1])
        assert (pool.pos_min(turn % 2), pool.pos_max(turn % 2)) == (-1, -1)
        # A pool needs no weights to take its states again.
        pool.wake()
        chat.resume(pool, (turn + 1) % 2)
        model.wake()
        chat.run(pool, (turn + 1) % 2, 3)
    pool.close()
    chat.sampler.close()
    assert chat.out == expected


def test_a_sleeping_pool_is_empty_and_refuses_work(model: LlamaModel, books: Books) -> None:
    pool = model.open_pool(SHAPE)
    pool.decode([(0, some_ids(9, 1), 0, True)])
    blob = bytearray(pool.state_bytes(0))
    pool.get_state(0, memoryview(blob))
    pool.sleep()
    assert pool.state_bytes(0) == 0
    assert pool.get_state(0, memoryview(bytearray(8))) == 0
    assert pool.truncate(0, 0)
    with pytest.raises(Internal, match="sleeps"):
        pool.decode([(0, some_ids(2, 1), 0, True)])
    with pytest.raises(Internal, match="sleeps"):
        pool.set_state(0, memoryview(blob))
    books.full = True
    with pytest.raises(ResourceExhausted) as caught:
        pool.wake()
    assert caught.value.reason == "wake_failed"
    with pytest.raises(Internal, match="sleeps"):
        pool.set_state(0, memoryview(blob))
    books.full = False
    pool.wake()
    pool.set_state(0, memoryview(blob))
    assert pool.pos_max(0) == 8
    pool.sleep()
    pool.close()


def test_what_a_decode_allocates_belongs_to_its_pool(
    model: LlamaModel, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp may need a larger compute buffer then; one outside would not sleep."""
    first, second = model.open_pool(SHAPE), model.open_pool(SHAPE)
    tags = books.inside[-2:]
    seen: list[int] = []
    decode = ll.llama_decode

    def watched(*arguments: Any) -> int:
        seen.append(books.now)
        return int(decode(*arguments))

    monkeypatch.setattr(ll, "llama_decode", watched)
    for pool in (first, second, first):
        pool.decode([(0, some_ids(2, 1), pool.pos_max(0) + 1, True)])
    assert seen == [tags[0], tags[1], tags[0]]
    assert books.now == 0
    first.close()
    second.close()


def test_a_copy_that_fails_is_told_and_empties_what_it_was_to_fill(
    model: LlamaModel, books: Books
) -> None:
    pool = model.open_pool(SHAPE)
    pool.decode([(0, some_ids(9, 1), 0, True)])
    blob = bytearray(pool.state_bytes(0))
    books.broken = True
    with pytest.raises(Internal, match="copying failed"):
        pool.get_state(0, memoryview(blob))
    assert pool.pos_max(0) == 8
    books.broken = False
    pool.get_state(0, memoryview(blob))
    books.broken = True
    with pytest.raises(Internal, match="copying failed") as caught:
        pool.set_state(1, memoryview(blob))
    assert caught.value.reason == "state_failed"
    assert (pool.pos_min(1), pool.pos_max(1)) == (-1, -1)
    books.broken = False
    pool.set_state(1, memoryview(blob))
    assert pool.pos_max(1) == 8
    pool.close()


def test_a_model_is_backed_up_once_and_closes_in_its_sleep(model: LlamaModel, books: Books) -> None:
    assert model.sleepable
    assert model.backup_bytes == 0
    model.back_up()
    model.back_up()
    assert model.backup_bytes == 77
    model.drop_backup()
    model.drop_backup()
    assert model.backup_bytes == 0
    model.back_up()
    model.sleep()
    books.full = True
    with pytest.raises(ResourceExhausted):
        model.wake()
    model.close()


def test_memory_that_was_not_caught_cannot_sleep(engine: LlamaEngine) -> None:
    path = str(make_model(Spec()))
    model = LlamaModel(path, "llama", engine.options, None, cast("Vmm", Books(allocations=0)))
    pool = model.open_pool(SHAPE)
    assert (model.sleepable, pool.sleepable) == (False, False)
    pool.close()
    model.close()


def test_without_the_library_it_is_said_why_nothing_sleeps(engine: LlamaEngine) -> None:
    assert (engine.mechanism, engine.used_bytes()) == ("state-swap", None)
    vmm, mechanism, note = choose_mechanism(EngineOptions(device_kind="cuda"))
    assert (vmm, mechanism) == (None, "state-swap")
    assert "preload library" in note
    unsleepable: Any = engine.load(str(make_model(Spec())), "llama")
    assert not unsleepable.sleepable
    unsleepable.close()
