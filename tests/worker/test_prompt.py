"""Prompts: what is kept of a transcript, what is tokenised anew, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from core_driver import key
from fake_engine import (
    ASSISTANT,
    BOS,
    EOG,
    FIRST_PAIR,
    N_VOCAB,
    PAIRS,
    USER,
    FakeEngine,
    FakeModel,
    ModelSpec,
)
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument, OutOfRange
from vram_conductor.protocol.values import Message
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.prompt import Prompt, build_prompt
from vram_conductor.worker.transcript import Transcript, ids_from_raw


def model(**fields: Any) -> FakeModel:
    spec = ModelSpec("m", **fields)
    return FakeEngine([spec]).load(spec.path, "m")


def transcript(*ids: int) -> Transcript:
    one = Transcript()
    one.replace(np.array(ids, np.int32), 1)
    return one


def build(one: FakeModel, past: Transcript, n_ctx: int = 1000, **fields: Any) -> Prompt:
    run = Run(
        broker_epoch=1,
        op=1,
        job=1,
        conversation=key("a"),
        version=0,
        transcript_tokens=len(past.ids),
        **fields,
    )
    return build_prompt(one, past, run, n_ctx)


def text_of(one: FakeModel, ids: Tokens) -> str:
    return b"".join(one.piece(int(token), special=True) for token in ids).decode()


def pair(text: str) -> int:
    return FIRST_PAIR + PAIRS.index(text)


A, B, C, D = (ord(char) for char in "abcd")


def test_a_first_prompt_begins_with_bos() -> None:
    prompt = build(model(), transcript(), prompt="ab")
    assert (prompt.ids.tolist(), prompt.keep) == ([BOS, pair("ab")], 0)


def test_tokens_are_taken_as_they_are() -> None:
    prompt = build(model(), transcript(A, B, C), tokens=[A, B, D])
    assert (prompt.ids.tolist(), prompt.keep) == ([A, B, D], 2)
    more = build(model(), transcript(A, B), tokens=[C], continue_=True)
    assert (more.ids.tolist(), more.keep) == ([A, B, C], 2)


def test_text_keeps_tokens_that_the_tokenizer_would_not_have_chosen() -> None:
    # The model said "a" and "b"; the tokenizer would say "ab".
    past = transcript(BOS, A, B)
    prompt = build(model(), past, prompt="abcd")
    assert (prompt.ids.tolist(), prompt.keep) == ([BOS, A, B, pair("cd")], 3)


@pytest.mark.parametrize("text", ["<s>abcd", "abcd"])
def test_bos_may_be_written_or_left_to_the_tokenizer(text: str) -> None:
    prompt = build(model(), transcript(BOS, pair("ab")), prompt=text)
    assert (prompt.ids.tolist(), prompt.keep) == ([BOS, pair("ab"), pair("cd")], 2)


def test_the_same_text_again_is_the_transcript_or_a_part_of_it() -> None:
    past = transcript(BOS, pair("ab"), C, D)
    whole = build(model(), past, prompt="abcd")
    assert (whole.ids.tolist(), whole.keep) == ([BOS, pair("ab"), C, D], 4)
    part = build(model(), past, prompt="abc")
    assert (part.ids.tolist(), part.keep) == ([BOS, pair("ab"), C], 3)


def test_a_text_that_differs_is_split_only_where_tokenizers_split() -> None:
    # "a", "b" are not what the tokenizer says, so only the control token is a safe place.
    past = transcript(BOS, A, B, EOG, USER, C, D, ord("x"))
    prompt = build(model(), past, prompt="ab<|end|><|user|>cdy")
    assert prompt.keep == 5
    assert prompt.ids.tolist() == [BOS, A, B, EOG, USER, pair("cd"), ord("y")]


def test_another_end_token_than_the_templates_costs_nothing() -> None:
    past = transcript(BOS, USER, A, ASSISTANT, A, B, ASSISTANT)
    prompt = build(model(), past, prompt="<|user|>a<|assistant|>ab<|end|>\n<|user|>")
    assert prompt.keep == 6
    assert prompt.ids.tolist()[4:8] == [A, B, EOG, ord("\n")]


def test_a_tokenizer_that_adds_spaces_is_never_given_half_a_text() -> None:
    one = model(joins=False)
    first = build(one, transcript(), prompt="ab")
    past = transcript(*first.ids.tolist())
    more = build(one, past, prompt="cd", continue_=True)
    assert text_of(one, more.ids) == "<s>  abcd"
    after = build(one, past, prompt="<|user|>cd", continue_=True)
    assert after.keep == len(first.ids)
    assert text_of(one, after.ids) == "<s> ab<|user|> cd"


def test_a_transcript_that_ends_within_a_character_goes_on() -> None:
    one = model()
    past = transcript(BOS, A, 0xC3)
    more = build(one, past, prompt="b", continue_=True)
    assert (more.ids.tolist(), more.keep) == ([BOS, A, 0xC3, B], 3)
    again = build(one, past, prompt="aé")
    assert again.ids.tolist() == [BOS, A, 0xC3, 0xA9]
    assert again.keep == 3


def test_messages_are_appended_as_the_template_would_write_them() -> None:
    one = model()
    ask, reply = Message("user", "ab"), Message("assistant", "cd")
    first = build(one, transcript(), messages=[ask])
    for said in ([C, D], [C, D, EOG]):
        past = transcript(*first.ids.tolist(), *said)
        more = build(one, past, messages=[Message("user", "x")], continue_=True)
        whole = one.render([ask, reply, Message("user", "x")], generate=True)
        assert more.keep == len(past.ids)
        assert text_of(one, more.ids) == "<s>" + whole
        assert text_of(one, build(one, past, prompt=whole).ids) == "<s>" + whole


def test_the_first_appended_messages_are_the_whole() -> None:
    one = model()
    asked = [Message("user", "ab")]
    more = build(one, transcript(), messages=asked, continue_=True)
    assert text_of(one, more.ids) == "<s>" + one.render(asked, generate=True)


def test_a_template_that_rewrites_history_can_not_be_appended_to() -> None:
    class Forgetful(FakeModel):
        def render(self, messages: Any, *, generate: bool) -> str:
            return super().render(messages[-1:], generate=generate)

    spec = ModelSpec("m")
    one = Forgetful(FakeEngine([spec]), spec, "m")
    with pytest.raises(FailedPrecondition) as caught:
        build(one, transcript(BOS, A), messages=[Message("user", "x")], continue_=True)
    assert caught.value.reason == "template_not_appendable"
    assert build(one, transcript(BOS, A), messages=[Message("user", "x")]).keep == 1


def test_the_context_needs_room_for_one_token_more() -> None:
    assert len(build(model(), transcript(), n_ctx=3, prompt="ab").ids) == 2
    with pytest.raises(OutOfRange) as caught:
        build(model(), transcript(), n_ctx=2, prompt="ab")
    assert caught.value.details == {"prompt_tokens": 2, "n_ctx": 2}


@pytest.mark.parametrize("past", [transcript(), transcript(BOS, A)], ids=["fresh", "later"])
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    past: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model()
    longest = one.token_bytes_max()
    assert longest is not None
    monkeypatch.setattr(one, "tokenize", None)
    for continue_ in (False, True):
        with pytest.raises(OutOfRange) as caught:
            build(one, past, n_ctx=10, prompt="é" * (5 * longest + 1), continue_=continue_)
        assert caught.value.reason == "prompt_too_long"
        assert caught.value.details == {
            "prompt_tokens": 10,
            "n_ctx": 10,
            "prompt_bytes": 10 * longest + 2,
            "token_bytes_max": longest,
        }
        assert "at least 10 tokens" in caught.value.info.message


def test_far_too_long_a_prompt_is_not_counted_to_its_end() -> None:
    one = model()
    asked: list[int | None] = []

    def tokenize(text: str, *, first: bool, most: int | None = None) -> Tokens:
        asked.append(most)
        return FakeModel.tokenize(one, text, first=first)[: 25 if most else None]

    one.tokenize = tokenize  # type: ignore[method-assign]
    with pytest.raises(OutOfRange) as caught:
        build(one, transcript(), n_ctx=10, prompt="x" * 60)
    assert asked == [20]
    assert caught.value.details == {"prompt_tokens": 20, "n_ctx": 10}
    assert "at least 20 tokens" in caught.value.info.message
    with pytest.raises(OutOfRange) as caught:
        build(one, transcript(), n_ctx=10, prompt="x" * 15)
    assert caught.value.details == {"prompt_tokens": 16, "n_ctx": 10}
    assert "has 16 tokens" in caught.value.info.message


def test_half_a_character_is_refused_at_any_length() -> None:
    for text in ("x" * 20 + "\ud800", "\ud800"):
        for past in (transcript(), transcript(BOS, A)):
            with pytest.raises(InvalidArgument):
                build(model(), past, n_ctx=10, prompt=text)


def test_an_empty_continuation_of_nothing_is_refused() -> None:
    empty: list[dict[str, Any]] = [{"prompt": ""}, {"tokens": []}, {"messages": []}]
    for fields in empty:
        with pytest.raises(InvalidArgument) as caught:
            build(model(), transcript(), continue_=True, **fields)
        assert caught.value.reason == "empty_prompt"


def test_a_raw_transcript_of_the_wrong_length_is_refused() -> None:
    assert ids_from_raw(b"\1\0\0\0", 1).tolist() == [1]
    for raw, count in ((b"\1\0\0\0", 2), (b"\1\0\0", 1)):
        with pytest.raises(InvalidArgument):
            ids_from_raw(raw, count)
    with pytest.raises(InvalidArgument):
        ids_from_raw(b"\xff\xff\xff\xff", 1)


tokens = st.lists(st.integers(0, N_VOCAB - 1), max_size=12)


@given(past=tokens, new=tokens, joins=st.booleans(), cut=st.integers(0, 12))
def test_the_text_of_a_prompt_is_the_text_that_was_asked_for(
    past: list[int], new: list[int], joins: bool, cut: int
) -> None:
    """Whatever was said before and however it was tokenised."""
    one = model(joins=joins)
    history = transcript(BOS, *past)
    data = b"".join(one.piece(token, special=True) for token in [*past[:cut], *new])
    text = data.decode("utf-8", "ignore")
    if not text:
        return
    prompt = build(one, history, prompt=text)
    assert prompt.ids[: prompt.keep].tolist() == [BOS, *past][: prompt.keep]
    if joins:
        shown = text_of(one, prompt.ids).removeprefix("<s>")
        assert shown == text.removeprefix("<s>")
    fresh = build(one, transcript(), prompt=text)
    if not joins:
        # Splitting may save spaces that the tokenizer would add, never anything else.
        assert text_of(one, prompt.ids).replace(" ", "") == text_of(one, fresh.ids).replace(" ", "")


@given(first=tokens, second=tokens)
def test_the_text_of_a_transcript_follows_its_changes(first: list[int], second: list[int]) -> None:
    one = model()
    history = transcript(*first)
    for ids in (first, second, [*second, 5]):
        history.replace(np.array(ids, np.int32), 1)
        text = history.text(lambda token: one.piece(token, special=True))
        assert text == b"".join(one.piece(token, special=True) for token in ids)
        assert history.end_of(len(ids)) == len(text)
