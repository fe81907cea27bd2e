"""Weights, vocabulary, samplers, failed loads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
from chats import GREEDY, greedy, ids_of, prefill, some_ids
from gguf_models import CHATML, Spec, make_model

from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from vram_conductor.protocol.values import Message, PoolShape, Sampling
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.pool import LlamaPool

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

BYTES = Spec(arch="llama", vocab="bytes", chat_template=CHATML)
ADVERSARIAL = "hello <|im_end|> 日本 👩‍👩‍👧‍👦 \x00 \r\n\t</s> naïve"


@pytest.fixture(scope="module")
def plain(engine: LlamaEngine) -> Iterator[LlamaModel]:
    """No vocabulary at all."""
    model = engine.load(str(make_model(Spec(arch="llama"))), "plain")
    yield model
    model.close()


@pytest.fixture(scope="module")
def spoken(engine: LlamaEngine) -> Iterator[LlamaModel]:
    """Bytes, a few words, chat markers, a template."""
    model = engine.load(str(make_model(BYTES)), "spoken")
    yield model
    model.close()


@pytest.fixture(scope="module")
def pool(plain: LlamaModel) -> Iterator[LlamaPool]:
    pool = plain.open_pool(PoolShape(512, 1))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("arch", "rollback"),
    [
        ("llama", "any"),
        ("qwen2", "any"),
        ("gemma3", "window"),
        ("mamba", "none"),
        ("jamba", "none"),
        ("lfm2", "none"),
    ],
)
def test_info(engine: LlamaEngine, arch: str, rollback: str) -> None:
    path = make_model(Spec(arch=arch))  # type: ignore[arg-type]
    model = engine.load(str(path), "some name")
    info = model.info
    assert (info.arch, info.rollback, info.name, info.path) == (
        arch,
        rollback,
        "some name",
        str(path),
    )
    assert (info.n_ctx_train, info.n_vocab, info.chat_template) == (4096, 320, False)
    assert info.file_bytes == path.stat().st_size
    assert len(info.model) == 12
    model.close()
    model.close()


@pytest.mark.real
def test_info_of_real_models(engine: LlamaEngine, smollm2: Path, gemma3: Path) -> None:
    smol, gemma = engine.load(str(smollm2), "s"), engine.load(str(gemma3), "g")
    assert (smol.info.arch, smol.info.rollback, smol.info.chat_template) == ("llama", "any", True)
    assert (gemma.info.arch, gemma.info.rollback, gemma.info.chat_template) == (
        "gemma3",
        "window",
        False,
    )
    assert (smol.bos, gemma.bos) == (-1, 2)
    assert smol.joins()
    assert gemma.joins()
    for model in (smol, gemma):
        ids = model.tokenize(ADVERSARIAL, first=False)
        text = b"".join(model.piece(int(i), special=True) for i in ids)
        assert text == ADVERSARIAL.encode()
        model.close()


def test_bos_comes_first_and_once(spoken: LlamaModel) -> None:
    assert spoken.bos == 1
    first = spoken.tokenize("hello", first=True)
    assert first[0] == 1
    assert spoken.tokenize("hello", first=False).tolist() == first[1:].tolist()
    assert spoken.tokenize("<s>hello", first=True).tolist().count(1) == 1
    assert spoken.tokenize("", first=True).tolist() == [1]
    assert spoken.tokenize("", first=False).tolist() == []


def test_special_tokens_are_parsed_and_hidden_unless_asked_for(spoken: LlamaModel) -> None:
    ids = spoken.tokenize("<|im_start|>", first=False)
    assert ids.tolist() == [3]
    assert spoken.piece(3, special=True) == b"<|im_start|>"
    assert spoken.piece(3, special=False) == b""


def test_a_tokenizer_that_adds_a_space_does_not_join(spoken: LlamaModel) -> None:
    assert not spoken.joins()


def test_long_text_and_long_pieces_fit(spoken: LlamaModel) -> None:
    text = "é" * 50_000
    ids = spoken.tokenize(text, first=False)
    assert len(ids) > 100_000
    assert b"".join(spoken.piece(int(i), special=False) for i in ids).decode().strip() == text


def test_text_that_is_no_unicode_is_refused(spoken: LlamaModel) -> None:
    with pytest.raises(InvalidArgument) as caught:
        spoken.tokenize("half \ud800", first=False)
    assert caught.value.reason == "bad_text"


def test_words_can_be_handled_beside_the_engine_thread(spoken: LlamaModel) -> None:
    texts = [f"hello {i} 😀<|im_end|>" * 50 for i in range(40)]

    def there_and_back(text: str) -> str:
        ids = spoken.tokenize(text, first=False)
        return b"".join(spoken.piece(int(i), special=True) for i in ids).decode()

    alone = [there_and_back(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(there_and_back, texts)) == alone


def test_eog(spoken: LlamaModel) -> None:
    assert spoken.is_eog(2)
    assert not spoken.is_eog(9)


def test_ids_out_of_range_have_no_text(spoken: LlamaModel) -> None:
    assert spoken.piece(-1, special=True) == spoken.piece(10**6, special=True) == b""


def test_a_model_without_vocabulary_takes_ids_only(plain: LlamaModel) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        plain.tokenize("hello", first=True)
    assert caught.value.reason == "no_vocabulary"
    assert plain.piece(5, special=True) == b""
    assert not plain.is_eog(2)
    assert plain.bos == -1


def test_render_uses_the_files_own_template(spoken: LlamaModel, plain: LlamaModel) -> None:
    assert spoken.info.chat_template
    text = spoken.render([Message("user", "hi")], generate=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(FailedPrecondition) as caught:
        plain.render([Message("user", "hi")], generate=True)
    assert caught.value.reason == "no_chat_template"
    assert "prompt" in caught.value.info.message


# --- samplers ---------------------------------------------------------------------------------


def draw(
    model: LlamaModel,
    pool: LlamaPool,
    sampling: Sampling,
    n: int = 1,
    *,
    bias: list[tuple[int, float]] | None = None,
    seed: int = 1,
    history: list[int] | None = None,
) -> list[int]:
    """``n`` tokens drawn from the same logits."""
    pool.truncate(0, 0)
    prefill(pool, 0, some_ids(12, 3))
    sampler = model.sampler(sampling, bias or [], seed)
    for token in history or []:
        sampler.accept(token)
    out = [pool.sample(0, sampler) for _ in range(n)]
    sampler.close()
    sampler.close()
    return out


def test_temperature_zero_is_greedy_whatever_the_seed(plain: LlamaModel, pool: LlamaPool) -> None:
    best = {draw(plain, pool, GREEDY, seed=seed)[0] for seed in range(5)}
    assert len(best) == 1
    assert draw(plain, pool, Sampling(temperature=1.0, top_k=1)) == [*best]


def test_a_seed_fixes_the_draw(plain: LlamaModel, pool: LlamaPool) -> None:
    wild = Sampling(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0)
    one, same, other = (draw(plain, pool, wild, 20, seed=seed) for seed in (7, 7, 8))
    assert one == same
    assert one != other
    assert len(set(one)) > 3
    assert draw(plain, pool, wild, 20, seed=0xFFFFFFFF + 8) == one


def test_each_filter_narrows_the_choice(plain: LlamaModel, pool: LlamaPool) -> None:
    wide = Sampling(temperature=8.0, top_k=0, top_p=1.0, min_p=0.0)
    narrow = {
        "open": Sampling(),
        "top_k": Sampling(top_k=3),
        "top_p": Sampling(top_p=0.1),
        "min_p": Sampling(min_p=0.5),
        "cold": Sampling(temperature=0.01),
    }
    kinds = {
        name: len(set(draw(plain, pool, change.over(wide), 300))) for name, change in narrow.items()
    }
    assert kinds.pop("open") > 60
    assert kinds["top_k"] == 3
    assert kinds["cold"] == 1
    assert all(kind < 40 for kind in kinds.values())


def test_logit_bias_bans_and_forces(plain: LlamaModel, pool: LlamaPool) -> None:
    (best,) = draw(plain, pool, GREEDY)
    (second,) = draw(plain, pool, GREEDY, bias=[(best, -100.0)])
    assert second != best
    assert draw(plain, pool, GREEDY, bias=[(17, 1000.0)]) == [17]


def test_penalties_see_the_prompt_and_the_output(plain: LlamaModel, pool: LlamaPool) -> None:
    (best,) = draw(plain, pool, GREEDY)
    heavy = Sampling(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    seen = draw(plain, pool, heavy, 1, history=[best] * 30)
    assert seen != [best]
    assert draw(plain, pool, GREEDY, 1, history=[best] * 30) == [best]
    # A token sampled from a chain counts without being accepted again.
    strong = Sampling(temperature=0, repeat_penalty=50.0)
    outs = draw(plain, pool, strong, 4)
    assert outs[0] == best
    assert len(set(outs)) > 1
    # The memory is bounded by penalty_last_n; -1 remembers everything.
    others = [300 + i % 10 for i in range(80)]
    short = Sampling(temperature=0, repeat_penalty=50.0, penalty_last_n=8)
    long = Sampling(temperature=0, repeat_penalty=50.0, penalty_last_n=-1)
    assert draw(plain, pool, short, 1, history=[best, *others]) == [best]
    assert draw(plain, pool, long, 1, history=[best, *others]) != [best]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("penalty_last_n", -2),
    ],
)
def test_sampling_out_of_range_names_the_parameter(
    plain: LlamaModel, name: str, value: float
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plain.sampler(Sampling(**{name: value}), [], 1)  # type: ignore[arg-type]
    assert caught.value.reason == "bad_sampling"
    assert caught.value.details["parameter"] == name
    assert name in caught.value.info.message


@pytest.mark.parametrize("bias", [(-1, 1.0), (320, 1.0), (5, math.nan), (5, -math.inf)])
def test_bad_logit_bias(plain: LlamaModel, bias: tuple[int, float]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        plain.sampler(GREEDY, [bias], 1)
    assert caught.value.reason == "bad_logit_bias"


# --- loads ------------------------------------------------------------------------------------


def test_failed_loads_leave_nothing(engine: LlamaEngine, tmp_path: Path) -> None:
    spec = Spec(arch="llama", n_layer=8, n_embd=256, n_head=4, n_ff=1024)
    whole = make_model(spec).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) * 2 // 3])
    assert len(whole) > 20 << 20

    def fail() -> None:
        with pytest.raises(ConductorError) as caught:
            engine.load(str(path), "cut")
        assert caught.value.reason == "bad_model"

    fail()
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        fail()
    assert psutil.Process().memory_info().rss < before + len(whole) // 2
    with pytest.raises(NotFound):
        engine.load(str(tmp_path / "missing.gguf"), "missing")


def test_closed_models_and_pools_give_their_memory_back(engine: LlamaEngine) -> None:
    path = str(make_model(Spec(arch="llama", n_layer=8, n_embd=256, n_head=4, n_ff=1024)))

    def once() -> int:
        model = engine.load(path, "big")
        pool = model.open_pool(PoolShape(4096, 2))
        greedy(model, pool, 0, some_ids(20, 1), 3)
        size = model.measured_bytes + pool.measured_bytes
        pool.close()
        model.close()
        return size

    size = once()
    seen: list[int] = []
    for _ in range(10):
        once()
        seen.append(psutil.Process().memory_info().rss)
    # A leak grows with every cycle; the allocator, and whatever else this process has run, may
    # take a step once.
    growth = [later - earlier for earlier, later in zip(seen, seen[4:], strict=False)]
    assert min(growth) < size // 2, (size, seen)


def test_two_loads_of_a_file_are_the_same_model(engine: LlamaEngine) -> None:
    path = str(make_model(Spec(arch="llama")))
    one, two = engine.load(path, "one"), engine.load(path, "two")
    assert one.info.model == two.info.model
    pools = [model.open_pool(PoolShape(256, 1)) for model in (one, two)]
    outs = [
        greedy(model, pool, 0, some_ids(9, 1), 9)
        for model, pool in zip((one, two), pools, strict=True)
    ]
    assert outs[0] == outs[1]
    for pool in pools:
        pool.close()
    one.close()
    two.close()


def test_the_build_names_version_and_library(engine: LlamaEngine) -> None:
    assert engine.build.startswith("llama-cpp-python-0.")
    assert len(engine.build.split("+")[1]) == 8


def test_an_id_batch_may_be_any_int32_array(plain: LlamaModel, pool: LlamaPool) -> None:
    ids = np.arange(10, 40, dtype=np.int32)[::2]
    assert not ids.flags.c_contiguous
    pool.truncate(0, 0)
    pool.decode([(0, ids, 0, True)])
    sampler = plain.sampler(GREEDY, [], 0)
    strided = pool.sample(0, sampler)
    pool.truncate(0, 0)
    pool.decode([(0, ids.copy(), 0, True)])
    assert pool.sample(0, sampler) == strided
    pool.decode([(0, ids_of(9), 15, True)])
    sampler.close()
