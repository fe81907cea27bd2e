"""Splitting text at special tokens: the same as llama.cpp does it, in linear time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf_models import CHATML, Spec, make_model
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.specials import Specials

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine


def longest_first(tokens: list[bytes], data: bytes) -> list[bytes | int]:
    """llama.cpp's way: every token in turn, the longest first, from left to right."""
    parts: list[bytes | int] = [data]
    for text in sorted(tokens, key=len, reverse=True):
        fresh: list[bytes | int] = []
        for part in parts:
            if isinstance(part, int):
                fresh.append(part)
                continue
            for number, piece in enumerate(part.split(text)):
                fresh += ([tokens.index(text)] if number else []) + ([piece] if piece else [])
        parts = fresh
    return [part for part in parts if part != b""]


def specials(tokens: list[bytes]) -> Specials:
    return Specials([(text, number) for number, text in enumerate(tokens)])


small = st.binary(max_size=5).map(lambda raw: bytes(b"ab<\n"[byte % 4] for byte in raw))


@given(st.lists(small.filter(bool), unique=True, max_size=6), st.lists(small, max_size=12))
def test_what_claims_to_be_exact_is(tokens: list[bytes], pieces: list[bytes]) -> None:
    split = specials(tokens)
    data = b"".join(pieces)
    if split.exact:
        assert list(split.split(data)) == longest_first(tokens, data)


@pytest.mark.parametrize(
    ("tokens", "exact"),
    [
        ([], True),
        ([b"<s>", b"</s>", b"<|im_start|>", b"<|im_end|>"], True),
        ([b"\n" * count for count in range(1, 32)], True),
        ([b"<b>", b"<body>", b"<b", b"<"], True),
        ([b"ab", b"bcd"], False),
        ([b"ab", b"bc"], False),
        ([b"abc", b"cd"], True),
        ([b""], False),
    ],
    ids=str,
)
def test_overlaps_are_noticed(tokens: list[bytes], exact: bool) -> None:
    assert specials(tokens).exact is exact


def test_two_tokens_with_one_text_are_left_to_llama() -> None:
    assert not Specials([(b"<s>", 1), (b"<s>", 2)]).exact


def test_a_pattern_that_is_too_deep_is_left_to_llama() -> None:
    assert not specials([b"a" * count for count in range(1, 3000)]).exact


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("smollm2", marks=pytest.mark.real),
        pytest.param("gemma3", marks=pytest.mark.real),
        "bytes",
    ],
)
def model(engine: LlamaEngine, request: pytest.FixtureRequest) -> Iterator[LlamaModel]:
    if request.param == "bytes":
        path = make_model(Spec(arch="llama", vocab="bytes", chat_template=CHATML))
    else:
        path = request.getfixturevalue(request.param)
    model = engine.load(str(path), request.param)
    yield model
    model.close()


WORDS = ["\n", "\n\n", "\n" * 33, " ", "    ", "\t", "<", ">", "</", "<b>", "<unused", "a", "word"]
PIECES = [
    *WORDS,
    "é漢🙂",
    "<s>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<start_of_turn>",
    "[multimodal]",
]


def test_long_text_has_the_ids_that_llama_gives_it(model: LlamaModel) -> None:
    rng = np.random.default_rng(11)
    for _ in range(60):
        text = "".join(PIECES[int(at)] for at in rng.integers(0, len(PIECES), 400))
        whole = model._vocabulary._tokenize(text.encode(), special=True)
        assert np.array_equal(model.tokenize(text, first=False), whole)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma3", "a\n\n"),
        ("gemma3", "<b "),
        ("gemma3", " \n\t"),
        ("smollm2", "x<|im_end|>"),
    ],
)
def test_ten_times_the_text_takes_ten_times_as_long(
    engine: LlamaEngine, request: pytest.FixtureRequest, name: str, text: str
) -> None:
    model = engine.load(str(request.getfixturevalue(name)), name)

    def seconds(count: int) -> float:
        best = 1e9
        for _ in range(3):
            begin = time.perf_counter()
            model.tokenize(text * count, first=False)
            best = min(best, time.perf_counter() - begin)
        return best

    seconds(1000)  # the first look at the vocabulary
    # Linear is 10, the square 100.
    assert seconds(30_000) < 40 * seconds(3_000)
    model.close()


def test_nobody_waits_for_more_ids_than_can_be_used(model: LlamaModel) -> None:
    text = "some words\n\n" * 2000
    everything = model.tokenize(text, first=False)
    some = model.tokenize(text, first=False, most=100)
    assert len(some) > 100
    assert np.array_equal(some, everything[: len(some)])


def test_no_token_covers_more_than_the_bound(model: LlamaModel) -> None:
    bound = model.token_bytes_max()
    assert bound is not None
    pieces = [len(model.piece(token, special=True)) for token in range(model.info.n_vocab)]
    assert max(pieces) <= bound <= 4 * max(pieces)


def test_a_model_without_a_vocabulary_has_no_bound(engine: LlamaEngine) -> None:
    model = engine.load(str(make_model(Spec(arch="llama"))), "plain")
    try:
        assert model.token_bytes_max() is None
    finally:
        model.close()


def test_facts_outlive_the_weights(engine: LlamaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(make_model(Spec(arch="llama", vocab="bytes", label="facts")))
    first = engine.load(path, "first")
    bound = first.token_bytes_max()
    first.close()
    again = engine.load(path, "again")
    monkeypatch.setattr(type(again._vocabulary), "_look", None)
    assert again.token_bytes_max() == bound
    again.close()
