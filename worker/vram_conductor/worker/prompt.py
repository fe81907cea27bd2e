"""The token ids of a job's prompt, and how much of the transcript they begin with. *Pure* but for
the vocabulary and template that it asks.

Text is matched against the transcript's own text, and only what is new is tokenised: tokens that
a model generated are seldom the ones that a tokenizer would choose for the same text, so a
comparison of ids alone would lose the KV of most replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument, OutOfRange
from vram_conductor.protocol.values import Message
from vram_conductor.worker.engine import Model, Tokens
from vram_conductor.worker.tape import common_prefix
from vram_conductor.worker.transcript import Transcript, check_ids

_NO_IDS: Tokens = np.empty(0, np.int32)
_QUESTION, _ANSWER = "question-5f1c", "answer-9e27"
"""Contents of the two-message stub; words that no template writes itself."""

_COUNTED = 2
"""A prompt that is too long is counted up to this many times the context."""


@dataclass(frozen=True)
class Prompt:
    """The whole prompt.

    Attributes:
        ids: all of it, at least one token, fewer than the agent's ``n_ctx``.
        keep: so many of its first tokens are the transcript's first.
    """

    ids: Tokens
    keep: int


def build_prompt(model: Model, transcript: Transcript, run: Run, n_ctx: int) -> Prompt:
    """Prompt of ``run`` in a conversation that stands at ``transcript``.

    Raises:
        InvalidArgument: ``bad_input`` (not exactly one input), ``bad_tokens``, ``empty_prompt``,
            and what ``Model.render`` raises.
        OutOfRange: ``prompt_too_long``; nothing was changed.
        FailedPrecondition: ``no_chat_template``, ``template_not_appendable``.
    """
    inputs = [item for item in (run.messages, run.prompt, run.tokens) if item is not None]
    if len(inputs) != 1:
        raise InvalidArgument(
            "bad_input",
            f"give exactly one of messages, prompt and tokens, not {len(inputs)}",
            inputs=len(inputs),
        )
    most = n_ctx * _COUNTED
    if run.tokens is not None:
        prompt = _from_tokens(model, transcript, run.tokens, append=run.continue_)
    else:
        text = _new_text(model, transcript, run)
        _check_bytes(model, text, n_ctx)
        build = _append_text if run.continue_ else _match_text
        prompt = build(model, transcript, text, most)
    if len(prompt.ids) == 0:
        raise _empty_prompt()
    if len(prompt.ids) >= n_ctx:
        counted = run.tokens is not None or len(prompt.ids) <= most
        raise _too_long(n_ctx, len(prompt.ids) if counted else most, exact=counted)
    return prompt


def _empty_prompt() -> InvalidArgument:
    return InvalidArgument("empty_prompt", "the prompt has no tokens; send some text")


def _too_long(n_ctx: int, tokens: int, *, exact: bool = True, **numbers: Any) -> OutOfRange:
    return OutOfRange(
        "prompt_too_long",
        f"the prompt has {'' if exact else 'at least '}{tokens} tokens and the agent's context "
        f"{n_ctx}, one of which the answer needs; shorten the prompt, reset the conversation or "
        "register the agent with a larger n_ctx",
        prompt_tokens=tokens,
        n_ctx=n_ctx,
        **numbers,
    )


def _check_bytes(model: Model, text: str, n_ctx: int) -> None:
    """Refuse without tokenising what cannot fit, whatever its tokens are.

    Raises:
        OutOfRange: ``prompt_too_long``.
        InvalidArgument: ``bad_text``: lone surrogates.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument("bad_text", f"the text is not valid Unicode: {error}") from None
    if size < n_ctx:
        # Short: nothing has to be known of the vocabulary, which may take a while to find out.
        return
    longest = model.token_bytes_max()
    if longest is not None and size > n_ctx * longest:
        raise _too_long(
            n_ctx, size // longest, exact=False, prompt_bytes=size, token_bytes_max=longest
        )


def _from_tokens(
    model: Model, transcript: Transcript, tokens: list[int], *, append: bool
) -> Prompt:
    try:
        ids = np.array(tokens, dtype=np.int32)
    except OverflowError:
        raise InvalidArgument("bad_tokens", "a token id does not fit into 31 bits") from None
    check_ids(ids, model.info.n_vocab, "bad_tokens")
    record = transcript.ids.view()
    if append:
        return Prompt(np.concatenate([record, ids]), len(record))
    return Prompt(ids, common_prefix(record, ids))


def _new_text(model: Model, transcript: Transcript, run: Run) -> str:
    if run.messages is None:
        if not run.prompt and not (run.continue_ and len(transcript.ids)):
            raise _empty_prompt()
        return run.prompt or ""
    if not run.messages:
        raise _empty_prompt()
    if run.continue_ and len(transcript.ids):
        return _appended_messages(model, transcript, run.messages)
    return model.render(run.messages, generate=True)


def _appended_messages(model: Model, transcript: Transcript, messages: Sequence[Message]) -> str:
    """What the template would write for ``messages`` after an assistant's turn, preceded by the
    end of that turn as far as the transcript lacks it."""
    stub = [Message("user", _QUESTION), Message("assistant", _ANSWER)]
    before = model.render(stub, generate=False)
    after = model.render([*stub, *messages], generate=True)
    if not after.startswith(before) or _ANSWER not in before:
        raise FailedPrecondition(
            "template_not_appendable",
            f"the chat template of {model.info.name} rewrites earlier messages, so nothing can be "
            "appended; send the whole list of messages without continue",
            model=model.info.model,
        )
    closing = before[before.rindex(_ANSWER) + len(_ANSWER) :]
    last = transcript.ids.last()
    if model.is_eog(last):
        closing = closing.removeprefix(model.piece(last, special=True).decode("utf-8", "replace"))
    return closing + after[len(before) :]


def _is_control(model: Model, token: int) -> bool:
    return not model.piece(token, special=False) and bool(model.piece(token, special=True))


def _history(model: Model, transcript: Transcript) -> bytes:
    return transcript.text(lambda token: model.piece(token, special=True))


def _append_text(model: Model, transcript: Transcript, text: str, most: int) -> Prompt:
    record = transcript.ids.view()
    if len(record) == 0:
        return Prompt(model.tokenize(text, first=True, most=most), 0)
    more = model.tokenize(text, first=False, most=most) if text else _NO_IDS
    if len(more) == 0 or model.joins() or _is_hard(model, int(record[-1]), more):
        return Prompt(np.concatenate([record, more]), len(record))
    try:
        whole = (_history(model, transcript) + text.encode()).decode()
    except UnicodeDecodeError:
        # The transcript ends within a character: there is no whole text to tokenise.
        return Prompt(np.concatenate([record, more]), len(record))
    ids = model.tokenize(whole, first=True, most=most)
    return Prompt(ids, common_prefix(record, ids))


def _is_hard(model: Model, before: int, after: Tokens) -> bool:
    """Whether tokenizers split there in any case: a control token on either side."""
    return _is_control(model, before) or (len(after) > 0 and _is_control(model, int(after[0])))


def _match_text(model: Model, transcript: Transcript, text: str, most: int) -> Prompt:
    record = transcript.ids.view()
    if len(record) == 0:
        return Prompt(model.tokenize(text, first=True, most=most), 0)
    split = _split_text(model, transcript, text, most)
    if split is not None and split.keep == len(record):
        return split
    whole = model.tokenize(text, first=True, most=most)
    keep = common_prefix(record, whole)
    return split if split is not None and split.keep > keep else Prompt(whole, keep)


def _split_text(model: Model, transcript: Transcript, text: str, most: int) -> Prompt | None:
    """The prompt as the transcript's tokens, as far as their text goes, and new ones."""
    record = transcript.ids.view()
    data, history = text.encode(), _history(model, transcript)
    # The tokenizer adds BOS unasked; the transcript shows it, the client's text need not.
    bos_bytes = transcript.end_of(1) if int(record[0]) == model.bos else 0
    skip = 0 if data.startswith(history[:bos_bytes]) else bos_bytes
    length = transcript.tokens_within(skip + _common_bytes(history[skip:], data))
    boundary = length
    while boundary and not _is_control(model, int(record[boundary - 1])):
        boundary -= 1
    for keep in (length, boundary):
        if keep == 0:
            continue
        try:
            rest = data[transcript.end_of(keep) - skip :].decode()
        except UnicodeDecodeError:
            continue
        more = model.tokenize(rest, first=False, most=most) if rest else _NO_IDS
        joined = len(more) == 0 or (keep == len(record) and model.joins())
        if joined or _is_hard(model, int(record[keep - 1]), more):
            return Prompt(np.concatenate([record[:keep], more]), keep)
    return None


def _common_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    left = np.frombuffer(one, np.uint8, length)
    right = np.frombuffer(other, np.uint8, length)
    return int(np.flatnonzero(left != right)[0])
