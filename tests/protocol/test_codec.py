"""The codec: whatever comes in, only typed errors come out, and soon."""

import struct
import time
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram_conductor.protocol import codec, limits, messages
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    ErrorInfo,
    InvalidArgument,
    OutOfRange,
    Unimplemented,
)
from vram_conductor.protocol.vectors.client_cases import RID, client_vectors
from vram_conductor.protocol.vectors.vector import CODECS, Direction, Vector
from vram_conductor.protocol.vectors.worker_cases import worker_vectors

VALID = [*client_vectors(), *worker_vectors()]
OK_HEAD = b"\x83\xa1t\xa2OK\xa3rid\xc4\x10" + RID + b"\xa4body\x81\xa1x"
DECODE_HEAD = b"\x84\xa1t\xa6DECODE\xa3rid\xc4\x10" + RID + b"\xa5agent\xa1a"
SECONDS_MAX = 5.0
"""For eight megabytes of the worst input on a busy machine; a second when it is idle."""


def decode(body: bytes, direction: Direction = "client_to_broker") -> Any:
    return CODECS[direction].decode([limits.PREAMBLE, body])[0]


def refusal(body: bytes, direction: Direction = "client_to_broker") -> InvalidArgument:
    started = time.monotonic()
    with pytest.raises(InvalidArgument) as caught:
        decode(body, direction)
    assert time.monotonic() - started < SECONDS_MAX
    return caught.value


def only_typed_errors(direction: Direction, frames: list[bytes]) -> None:
    info = None
    try:
        CODECS[direction].decode(frames)
    except (InvalidArgument, Unimplemented) as error:
        info = error.info
    if info is not None:
        assert len(info.message) < 400
        codec.BROKER_TO_CLIENT.encode(messages.Error(rid=RID, error=info))
    codec.peek_rid(frames)


# --- bombs ---


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\1"])
def test_nesting_bombs_in_unknown_fields_and_bodies(opener: bytes) -> None:
    bomb = opener * 200_000 + b"\xc0"
    assert refusal(b"\x82\xa1t\xa4PING\xa1x" + bomb).reason == "bad_message"
    assert refusal(b"\x82\xa1t\xa4PING\xa1n" + bomb).reason == "bad_message"
    assert refusal(OK_HEAD + bomb, "broker_to_client").reason == "bad_message"
    assert codec.peek_rid([limits.PREAMBLE, OK_HEAD + bomb]) == b""


def test_a_nesting_bomb_deep_in_the_stack_of_the_caller() -> None:
    def recurse(depth: int) -> None:
        if depth:
            recurse(depth - 1)
        else:
            refusal(b"\x82\xa1t\xa4PING\xa1x" + b"\x91" * 200_000 + b"\xc0")

    recurse(500)


@pytest.mark.parametrize("depth", [limits.NESTING_MAX - 1, limits.NESTING_MAX])
def test_the_depth_of_a_body_is_limited(depth: int) -> None:
    body = OK_HEAD + b"\x91" * (depth - 1) + b"\x90"
    if depth < limits.NESTING_MAX:
        assert decode(body, "broker_to_client").body["x"]
    else:
        assert "nested deeper" in refusal(body, "broker_to_client").info.message


@pytest.mark.parametrize("field", ["tokens", "messages", "stop", "logit_bias", "prompt", "new"])
@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_length_bombs(field: str, header: bytes) -> None:
    name = bytes([0xA0 + len(field)]) + field.encode()
    refusal(DECODE_HEAD + name + header + b"\xff\xff\xff\xff\x01")


@pytest.mark.parametrize(
    ("field", "item"),
    [
        (b"\xa6tokens", b"\x00"),
        (b"\xa8messages", msgpack.packb({"role": "", "content": ""})),
        (b"\xa4stop", b"\xa0"),
        (b"\xaalogit_bias", b"\x92\x01\xca\0\0\0\0"),
        (b"\xa3new", b"\x80"),
    ],
    ids=["tokens", "messages", "stop", "bias", "unknown"],
)
def test_a_full_frame_of_small_things_is_decoded_in_time(field: bytes, item: bytes) -> None:
    count = (limits.MAP_BYTES_MAX - 200) // len(item)
    body = DECODE_HEAD + field + b"\xdd" + struct.pack(">I", count) + item * count
    started = time.monotonic()
    decode(body)
    assert time.monotonic() - started < SECONDS_MAX


def test_too_large_frames_are_refused_before_decoding() -> None:
    body = b"\x00" * (limits.MAP_BYTES_MAX + 1)
    error = refusal(body)
    assert error.details == {
        "frame": 1,
        "frame_bytes": limits.MAP_BYTES_MAX + 1,
        "limit": limits.MAP_BYTES_MAX,
    }


def test_the_message_of_an_error_quotes_little() -> None:
    error = refusal(msgpack.packb({"t": "X" * 1_000_000}))
    assert len(error.info.message) < 400


# --- free-form fields ---


@pytest.mark.parametrize("value", [msgpack.Timestamp(5), msgpack.ExtType(5, b"x"), {1: 2}])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [{"deep": [value]}]])
def test_only_plain_values_in_bodies_and_details(value: Any, wrap: Any) -> None:
    packed = msgpack.packb(wrap(value))
    refusal(OK_HEAD + packed, "broker_to_client")
    error = {"code": "INTERNAL", "reason": "x", "message": "y", "details": {"x": wrap(value)}}
    refusal(msgpack.packb({"t": "ERROR", "rid": RID, "error": error}), "broker_to_client")
    refusal(msgpack.packb({"t": "W_REFUSED", "error": error}), "broker_to_worker")


def test_plain_values_pass() -> None:
    value: dict[str, Any] = {
        "a": [None, True, 1, -1, 2**63, 0.5, "x", b"y", [], {}, {"k": {"l": [1]}}]
    }
    assert decode(OK_HEAD + msgpack.packb(value), "broker_to_client").body["x"] == value


# --- writing ---


@pytest.mark.parametrize(
    "message",
    [
        messages.Ping(n=2**64),
        messages.Hello(v=(1, 0), client="half \ud800"),
        messages.Ok(rid=RID, body={"x": object()}),
    ],
)
def test_what_msgpack_cannot_hold_is_a_typed_error(message: msgspec.Struct) -> None:
    with pytest.raises(InvalidArgument) as caught:
        codec.CLIENT_TO_BROKER.encode(message)
    assert caught.value.reason == "unencodable"


def test_endless_nesting_cannot_be_written() -> None:
    body: dict[str, Any] = {}
    body["me"] = body
    with pytest.raises(InvalidArgument):
        codec.CLIENT_TO_BROKER.encode(messages.Ok(rid=RID, body=body))


def test_too_large_messages_are_refused_with_numbers() -> None:
    big = messages.Decode(rid=RID, agent="a", prompt="x" * limits.MAP_BYTES_MAX)
    with pytest.raises(OutOfRange) as caught:
        codec.CLIENT_TO_BROKER.encode(big)
    assert caught.value.reason == "message_too_large"
    assert caught.value.details["value"] > caught.value.details["limit"] == limits.MAP_BYTES_MAX
    with pytest.raises(OutOfRange):
        codec.BROKER_TO_WORKER.encode(messages.Ping(), raw=[b"\0" * (limits.FRAME_BYTES_MAX + 1)])


def test_the_largest_legal_prompts_fit() -> None:
    text = messages.Decode(rid=RID, agent="a", prompt="😀" * limits.PROMPT_CHARS_MAX)
    codec.CLIENT_TO_BROKER.encode(text)
    ids = messages.Decode(rid=RID, agent="a", tokens=[200_000] * limits.PROMPT_TOKENS_MAX)
    codec.CLIENT_TO_BROKER.encode(ids)
    assert limits.N_CTX_MAX * 4 <= limits.FRAME_BYTES_MAX


# --- answering what could not be read ---


def test_peek_rid_finds_whom_to_answer() -> None:
    def peek(fields: dict[str, Any]) -> bytes:
        return codec.peek_rid([limits.PREAMBLE, msgpack.packb(fields)])

    assert peek({"t": "NEWTYPE", "rid": RID, "n": [1]}) == RID
    assert peek({"t": "REGISTER", "rid": RID, "n_ctx": "4096"}) == RID
    assert peek({"t": "PING"}) == b""
    assert peek({"rid": "text"}) == b""
    assert peek({"rid": b"short"}) == b""
    assert codec.peek_rid([]) == b""
    assert codec.peek_rid([b"VMC\x07", msgpack.packb({"rid": RID})]) == b""


# --- fuzzing ---


@settings(max_examples=500)
@given(st.sampled_from(list(CODECS)), st.lists(st.binary(max_size=60), max_size=6))
def test_random_frames(direction: Direction, frames: list[bytes]) -> None:
    only_typed_errors(direction, frames)


@settings(max_examples=1000)
@given(st.sampled_from(list(CODECS)), st.binary(max_size=200))
def test_random_maps(direction: Direction, body: bytes) -> None:
    only_typed_errors(direction, [limits.PREAMBLE, body])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=1000)
@given(st.sampled_from(VALID), st.data())
def test_valid_messages_with_any_value_in_any_field(vector: Vector, data: st.DataObject) -> None:
    fields = msgpack.unpackb(vector.frames[1])
    name = data.draw(st.sampled_from(sorted(fields)) | st.text(max_size=8))
    fields[name] = data.draw(VALUES)
    only_typed_errors(
        vector.direction, [vector.frames[0], msgpack.packb(fields), *vector.frames[2:]]
    )


@settings(max_examples=1500)
@given(st.sampled_from(VALID), st.data())
def test_valid_messages_with_damaged_bytes(vector: Vector, data: st.DataObject) -> None:
    body = bytearray(vector.frames[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(body) - 1)))
        kind = data.draw(st.sampled_from(("flip", "cut", "insert", "delete", "repeat")))
        if kind == "flip" and body:
            body[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del body[at:]
        elif kind == "insert":
            body[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif kind == "delete":
            del body[at : at + 1]
        else:
            body[at:at] = body[at : at + 16]
    only_typed_errors(vector.direction, [vector.frames[0], bytes(body), *vector.frames[2:]])


@given(st.sampled_from(VALID), st.sampled_from(list(CODECS)))
def test_messages_sent_to_the_wrong_side(vector: Vector, direction: Direction) -> None:
    only_typed_errors(direction, vector.frames)


def test_every_code_survives_the_wire() -> None:
    for code in Code:
        info = ErrorInfo(code, "why", "what to do", details={"n": 1})
        frames = codec.BROKER_TO_CLIENT.encode(messages.Error(rid=RID, error=info))
        message, _ = codec.BROKER_TO_CLIENT.decode(frames)
        assert isinstance(message, messages.Error)
        assert message.error == info


def test_an_unknown_code_is_refused_not_guessed() -> None:
    body = {"t": "ERROR", "rid": RID, "error": {"code": "TEAPOT", "reason": "r", "message": "m"}}
    with pytest.raises(ConductorError):
        decode(msgpack.packb(body), "broker_to_client")
