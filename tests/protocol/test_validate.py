"""Limits of client requests: the boundary passes, one beyond it is a typed error with numbers."""

import math
import time
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram_conductor.protocol import codec, limits, messages, validate
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.errors import (
    ConductorError,
    InvalidArgument,
    OutOfRange,
    Unimplemented,
)
from vram_conductor.protocol.messages import Decode, Register
from vram_conductor.protocol.values import SAMPLING_DEFAULTS, Message, Sampling
from vram_conductor.protocol.vectors.client_cases import RID, client_requests, decode_requests

DECODE = Decode(rid=RID, agent="coder", prompt="hi")
REGISTER = Register(rid=RID, agent="coder", model="m")


def changed(base: msgspec.Struct, **fields: Any) -> Any:
    return msgspec.structs.replace(base, **fields)


def refusal(message: Any) -> ConductorError:
    with pytest.raises((InvalidArgument, OutOfRange, Unimplemented)) as caught:
        validate.check(message)
    error: ConductorError = caught.value
    codec.BROKER_TO_CLIENT.encode(messages.Error(rid=RID, error=error.info))
    return error


def test_every_client_message_has_a_check() -> None:
    assert set(validate._CHECKS) == set(get_args(messages.ClientMessage))


@pytest.mark.parametrize("message", [*client_requests().values(), *decode_requests().values()])
def test_sound_requests_pass(message: Any) -> None:
    validate.check(message)


AMOUNTS = [
    (REGISTER, "n_ctx", 1, limits.N_CTX_MAX),
    (REGISTER, "slots", 1, limits.SLOTS_MAX),
    (REGISTER, "ttl_s", 1, limits.TTL_S_MAX),
    (DECODE, "max_tokens", 1, limits.MAX_TOKENS_MAX),
    (DECODE, "window", 0, limits.SEQ_MAX),
    (DECODE, "expect_version", 0, limits.VERSION_MAX),
    (DECODE, "queue_ms", 0, limits.TIME_MS_MAX),
    (DECODE, "timeout_ms", 1, limits.TIME_MS_MAX),
    (messages.Credit(rid=RID, ack=0, upto=0), "ack", 0, limits.SEQ_MAX),
    (messages.Credit(rid=RID, ack=0, upto=0), "upto", 0, limits.SEQ_MAX),
    (messages.Resume(rid=RID), "from_seq", 0, limits.SEQ_MAX),
    (Fork(rid=RID, agent="a", to="b"), "expect_version", 0, limits.VERSION_MAX),
    (History(rid=RID, agent="a"), "expect_version", 0, limits.VERSION_MAX),
    (History(rid=RID, agent="a"), "from_turn", 0, limits.SEQ_MAX),
    (History(rid=RID, agent="a"), "from_token", 0, limits.SEQ_MAX),
    (messages.Resume(rid=RID), "window", 0, limits.SEQ_MAX),
]


@pytest.mark.parametrize(("base", "field", "least", "most"), AMOUNTS)
def test_amounts(base: msgspec.Struct, field: str, least: int, most: int) -> None:
    validate.check(changed(base, **{field: least}))
    validate.check(changed(base, **{field: most}))
    below = refusal(changed(base, **{field: least - 1}))
    assert isinstance(below, InvalidArgument)
    assert below.reason == "bad_value"
    assert below.details == {"field": field, "value": least - 1, "minimum": least, "limit": most}
    above = refusal(changed(base, **{field: most + 1}))
    assert isinstance(above, OutOfRange)
    assert above.reason == "limit_exceeded"
    assert above.details == {"field": field, "value": most + 1, "limit": most}
    assert str(most) in above.info.message


@pytest.mark.parametrize("base", [DECODE, REGISTER])
def test_priorities(base: msgspec.Struct) -> None:
    most = limits.PRIORITY_MAX
    for priority in (-most, 0, most):
        validate.check(changed(base, priority=priority))
    for priority in (-most - 1, most + 1):
        assert refusal(changed(base, priority=priority)).reason == "bad_value"


SAMPLING = [
    # field, values that pass, values that do not
    ("temperature", [0.0, 0.7, 100.0], [-0.01, 100.1]),
    ("top_k", [0, 40, 2**31 - 1], [-1, 2**31]),
    ("top_p", [1e-9, 0.5, 1.0], [0.0, -0.1, 1.0001]),
    ("min_p", [0.0, 1.0], [-0.0001, 1.0001]),
    ("repeat_penalty", [0.01, 1.0, 100.0], [0.0, -1.0, 101.0]),
    ("presence_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1]),
    ("frequency_penalty", [-2.0, 0.0, 2.0], [-2.1, 2.1]),
    ("penalty_last_n", [-1, 0, 64], [-2, limits.N_CTX_MAX + 1]),
    ("seed", [0, 2**32 - 1], [-1, 2**32]),
]


@pytest.mark.parametrize(("field", "good", "bad"), SAMPLING)
def test_sampling(field: str, good: list[float], bad: list[float]) -> None:
    for value in good:
        sampling = Sampling(**{field: value})  # type: ignore[arg-type]
        validate.check_sampling(sampling)
        validate.check(changed(DECODE, sampling=sampling))
    for value in [*bad, math.nan, math.inf, -math.inf]:
        sampling = Sampling(**{field: value})  # type: ignore[arg-type]
        for message in (changed(DECODE, sampling=sampling), changed(REGISTER, sampling=sampling)):
            error = refusal(message)
            assert error.details["field"] == f"sampling.{field}"
            assert isinstance(error, InvalidArgument)


def test_every_sampling_field_is_checked_and_defaults_pass() -> None:
    assert [row[0] for row in SAMPLING] == list(Sampling.__struct_fields__)
    validate.check_sampling(SAMPLING_DEFAULTS)
    validate.check_sampling(Sampling())


GOOD_NAMES = ["a", "A1", "0", "coder-1.b:x@y_z", "a" * 64]
BAD_NAMES = [
    "",
    "\ud800",
    " ",
    "a b",
    "a/b",
    "../x",
    ".hidden",
    "-x",
    "_x",
    "a\n",
    "a\0",
    "é",
    "a" * 65,
]


@pytest.mark.parametrize(
    ("base", "field"),
    [
        (REGISTER, "agent"),
        (REGISTER, "device"),
        (DECODE, "agent"),
        (DECODE, "conversation"),
        (messages.Unregister(rid=RID, agent="a"), "agent"),
        (messages.Unregister(rid=RID, agent="a"), "principal"),
        (messages.Reset(rid=RID, agent="a"), "agent"),
        (messages.Reset(rid=RID, agent="a"), "conversation"),
        (Fork(rid=RID, agent="a", to="b"), "agent"),
        (Fork(rid=RID, agent="a", to="b"), "conversation"),
        (Fork(rid=RID, agent="a", to="b"), "to"),
        (History(rid=RID, agent="a"), "agent"),
        (History(rid=RID, agent="a"), "conversation"),
    ],
)
def test_names(base: msgspec.Struct, field: str) -> None:
    for name in GOOD_NAMES:
        validate.check(changed(base, **{field: name}))
    for name in BAD_NAMES:
        error = refusal(changed(base, **{field: name}))
        assert error.details["field"] == field
        assert error.reason == ("limit_exceeded" if len(name) > 64 else "bad_name")


def test_models_may_be_paths() -> None:
    for model in ("smollm2-135m", "/models/with space/é.gguf", "x" * limits.MODEL_CHARS_MAX):
        validate.check(changed(REGISTER, model=model))
    for model in ("", "a\0b", "a\nb", "a\ud800"):
        assert refusal(changed(REGISTER, model=model)).reason == "bad_value"
    assert isinstance(
        refusal(changed(REGISTER, model="x" * (limits.MODEL_CHARS_MAX + 1))), OutOfRange
    )


@pytest.mark.parametrize("rid", [b"", b"x" * 15, b"x" * 17])
def test_rids(rid: bytes) -> None:
    for message in client_requests().values():
        if hasattr(message, "rid"):
            error = refusal(changed(message, rid=rid))
            assert error.reason == "bad_rid"
            assert error.details == {"field": "rid", "value": len(rid), "limit": 16}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "bad_input"),
        ({"prompt": "x", "tokens": [1]}, "bad_input"),
        ({"prompt": "x", "messages": [Message("user", "x")]}, "bad_input"),
        ({"prompt": "", "tokens": []}, "bad_input"),
        ({"prompt": ""}, "empty_input"),
        ({"messages": []}, "empty_input"),
        ({"tokens": []}, "empty_input"),
    ],
)
def test_exactly_one_input_that_is_not_empty(fields: dict[str, Any], reason: str) -> None:
    assert refusal(Decode(rid=RID, agent="a", **fields)).reason == reason


def test_token_ids() -> None:
    def ask(*tokens: int) -> Decode:
        return Decode(rid=RID, agent="a", tokens=list(tokens))

    validate.check(ask(0, limits.TOKEN_ID_MAX))
    for bad in (-1, limits.TOKEN_ID_MAX + 1, 2**64 - 1):
        error = refusal(ask(5, 6, bad))
        assert error.details["field"] == "tokens[2]"
        assert error.details["value"] == bad
    too_many = refusal(ask(*[1] * (limits.PROMPT_TOKENS_MAX + 1)))
    assert isinstance(too_many, OutOfRange)
    assert too_many.details["limit"] == limits.PROMPT_TOKENS_MAX


def test_messages() -> None:
    def ask(*chat: tuple[str, str]) -> Decode:
        return Decode(rid=RID, agent="a", messages=[Message(*each) for each in chat])

    validate.check(ask(("user", ""), ("any role a template knows", "x")))
    for role in ("", "user\n"):
        assert refusal(ask(("user", "x"), (role, "x"))).details["field"] == "messages[1].role"
    assert refusal(ask(("user", "\udfff"))).details["field"] == "messages[0].content"
    assert isinstance(refusal(ask(*[("u", "")] * (limits.MESSAGES_MAX + 1))), OutOfRange)
    half = "x" * (limits.PROMPT_CHARS_MAX // 2)
    error = refusal(ask(("u", half), ("u", half)))
    assert error.details == {
        "field": "messages",
        "value": limits.PROMPT_CHARS_MAX + 2,
        "limit": limits.PROMPT_CHARS_MAX,
    }


def test_prompts_are_not_quoted_in_errors() -> None:
    error = refusal(changed(DECODE, prompt="secret" * limits.PROMPT_CHARS_MAX))
    assert "secret" not in repr(error.info)
    assert "secret" not in repr(refusal(changed(DECODE, prompt="secret\ud800")).info)
    assert "secret" not in repr(refusal(changed(DECODE, stop=["secret" * 100])).info)


def test_what_the_answer_must_look_like() -> None:
    longest = "é" * (limits.GRAMMAR_BYTES_MAX // 2)
    deepest: dict[str, Any] = {}
    for _ in range(limits.SCHEMA_NESTING_MAX - 1):
        deepest = {"items": deepest}
    good: list[dict[str, Any]] = [
        {"grammar": longest},
        {"json_schema": deepest},
        {"json_schema": {}},
    ]
    for fields in good:
        validate.check(changed(DECODE, **fields))
        assert changed(DECODE, **fields).structured
    assert not DECODE.structured
    refused: list[tuple[dict[str, Any], str]] = [
        ({"grammar": "x", "json_schema": {}}, "bad_input"),
        ({"grammar": ""}, "bad_value"),
        ({"grammar": longest + "x"}, "limit_exceeded"),
        ({"grammar": "\ud800"}, "bad_value"),
        ({"json_schema": {"items": deepest}}, "limit_exceeded"),
        ({"json_schema": {"title": "x" * limits.GRAMMAR_BYTES_MAX}}, "limit_exceeded"),
        ({"json_schema": {"const": math.inf}}, "bad_value"),
        ({"json_schema": {"const": b"x"}}, "bad_value"),
        ({"json_schema": {"properties": {1: {}}}}, "bad_value"),
    ]
    for bad, reason in refused:
        error = refusal(changed(DECODE, **bad))
        assert error.reason == reason, bad
        assert error.details["field"] in ("grammar", "json_schema")


def test_stop_and_bias() -> None:
    validate.check(changed(DECODE, stop=["x" * 256] * 16, logit_bias=[(0, -1000.0)] * 1024))
    for fields, field in (
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a", "x" * 257]}, "stop[1]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": [(1, 0.0)] * 1025}, "logit_bias"),
        ({"logit_bias": [(1, 0.0), (-1, 0.0)]}, "logit_bias[1][0]"),
        ({"logit_bias": [(1, math.nan)]}, "logit_bias[0][1]"),
        ({"logit_bias": [(1, 1000.5)]}, "logit_bias[0][1]"),
    ):
        assert refusal(changed(DECODE, **fields)).details["field"] == field


def test_what_is_not_offered_says_so() -> None:
    assert refusal(changed(DECODE, overflow="shift")).reason == "unsupported_overflow"
    error = refusal(messages.Hello(v=(limits.PROTOCOL_MAJOR + 1, 0)))
    assert error.reason == "unsupported_version"
    assert error.details == {"theirs": limits.PROTOCOL_MAJOR + 1, "ours": limits.PROTOCOL_MAJOR}


def test_the_largest_request_is_checked_in_time() -> None:
    big = Decode(rid=RID, agent="a", tokens=[200_000] * limits.PROMPT_TOKENS_MAX)
    started = time.monotonic()
    validate.check(big)
    assert time.monotonic() - started < 1.0


@settings(max_examples=400)
@given(
    st.builds(
        Decode,
        rid=st.binary(max_size=20),
        agent=st.text(max_size=5),
        conversation=st.text(max_size=5),
        messages=st.none() | st.lists(st.builds(Message, st.text(), st.text()), max_size=3),
        prompt=st.none() | st.text(),
        tokens=st.none() | st.lists(st.integers(-5, 2**40), max_size=3),
        max_tokens=st.none() | st.integers(-5, 2**64),
        sampling=st.builds(
            Sampling,
            temperature=st.none() | st.floats(),
            top_p=st.none() | st.floats(),
            seed=st.none() | st.integers(-5, 2**64),
        ),
        stop=st.lists(st.text(max_size=3), max_size=3),
        logit_bias=st.lists(st.tuples(st.integers(-5, 2**40), st.floats()), max_size=3),
    )
)
def test_any_request_passes_or_is_refused_with_a_typed_error(message: Decode) -> None:
    try:
        validate.check(message)
    except (InvalidArgument, OutOfRange, Unimplemented):
        return
    # What passes can be written and read, and passes there.
    again, _ = codec.CLIENT_TO_BROKER.decode(codec.CLIENT_TO_BROKER.encode(message))
    assert again == message
    validate.check(again)
