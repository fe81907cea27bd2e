"""Text through real tokenizers and back as a stream, character by character."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gguf_models import Spec, make_model

from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.text import TextStream, whole_text

if TYPE_CHECKING:
    from vram_conductor.worker.llama.engine import LlamaEngine

TEXTS = {
    "english": "The quick brown fox, 1,234.50 times.\n\n\tIndented; “quoted”.",
    "german": "Größenwahn, Straße, Äpfel — naïve façade",
    "chinese": "敏捷的棕色狐狸跳过懒狗。繁體與龘字",
    "japanese": "素早い茶色の狐が、のろまな犬を飛び越える。ｶﾀｶﾅ",
    "korean": "다람쥐 헌 쳇바퀴에 타고파",
    "arabic": "نصٌّ حكيمٌ له سرٌّ قاطعٌ وذو شأنٍ عظيمٍ",
    "hebrew": "דג סקרן שט בים מאוכזב",
    "devanagari": "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा",
    "thai": "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "emoji": "👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇩🇪❤️‍🔥😀",
    "zero width": "a\u200bb\u200cc\u200dd\ufeffe\u2060f",
    "combining": "e\u0301 n\u0303 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍",
    "old scripts": "𐍈𐌰𐌹 𒀀𒁀 𓀀𓁐",
    "maths": "𝔘𝔫𝔦 ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
    "markup": "<|im_start|>user\n</s><bos> <0x0A> [INST]",
}


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
        path = make_model(Spec(arch="llama", vocab="bytes"))
    else:
        path = request.getfixturevalue(request.param)
    model = engine.load(str(path), request.param)
    yield model
    model.close()


def pieces_of(model: LlamaModel, ids: list[int], *, special: bool) -> list[bytes]:
    return [model.piece(token, special=special) for token in ids]


def same(model: LlamaModel, got: str, text: str) -> bool:
    """Equal; a tokenizer that puts spaces before pieces is allowed its spaces."""
    return got == text if model.joins() else got.replace(" ", "") == text.replace(" ", "")


def streamed(pieces: list[bytes], stops: list[str]) -> str:
    stream = TextStream(stops)
    parts: list[str] = []
    for piece in pieces:
        parts.append(stream.push(piece))
        assert "\ufffd" not in parts[-1] or "\ufffd".encode() in b"".join(pieces)
    return "".join(parts) + stream.finish()


@pytest.mark.parametrize("script", TEXTS)
def test_every_script_comes_back_whole(model: LlamaModel, script: str) -> None:
    text = TEXTS[script]
    ids = model.tokenize(text, first=False).tolist()
    pieces = pieces_of(model, ids, special=True)
    back = streamed(pieces, [])
    assert same(model, back, text)
    assert back == whole_text(pieces)


def test_some_characters_are_split_over_tokens(model: LlamaModel) -> None:
    """Or else the tests above would prove nothing."""
    broken = 0
    for text in TEXTS.values():
        for piece in pieces_of(model, model.tokenize(text, first=False).tolist(), special=True):
            try:
                piece.decode()
            except UnicodeDecodeError:
                broken += 1
    assert broken > 10


def test_stop_strings_may_span_tokens_and_characters(model: LlamaModel) -> None:
    text = "".join(TEXTS.values())
    pieces = pieces_of(model, model.tokenize(text, first=False).tolist(), special=True)
    for stop in ("繁體", "‍👦", "𐌹 𒀀", "\u200cc\u200d", "זב", "quoted”.", "user\n</s"):
        expected = text[: text.index(stop)]
        assert same(model, streamed(pieces, [stop, "never there"]), expected)


def test_random_tokens_stream_like_the_whole(model: LlamaModel) -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        ids = rng.integers(0, model.info.n_vocab, 200).tolist()
        pieces = pieces_of(model, ids, special=False)
        stream = TextStream(["ab", "\n\n", "é"])
        got = "".join([stream.push(piece) for piece in pieces]) + stream.finish()
        assert got == whole_text(pieces, ["ab", "\n\n", "é"])
