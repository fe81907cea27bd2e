"""Broken messages, and sound ones that break a limit. *Pure.*

The refused value is always the only thing wrong, so the reason is unambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.vectors import fit_cases, structure_cases
from vram_conductor.protocol.vectors.client_cases import RID
from vram_conductor.protocol.vectors.vector import Direction, Vector
from vram_conductor.protocol.vectors.worker_cases import worker_vectors

PING = b"\x82\xa1t\xa4PING\xa1n\x07"


def invalid_vectors() -> Iterator[Vector]:
    """All of invalid.json."""
    yield from _broken_frames()
    yield from _broken_maps()
    yield from _broken_free_form()
    for name, change in {**_bad_requests(), **_bad_sampling()}.items():
        yield _request("decode", name, {"prompt": "hi", "agent": "coder"} | change)
    for name, change in _bad_registers().items():
        yield _request("register", name, {"agent": "coder", "model": "m"} | change)
    for kind, name, fields in _bad_others():
        yield _request(kind, name, fields)
    yield from _broken_worker_messages()


def _vector(name: str, frames: list[bytes], note: str = "") -> Vector:
    return Vector(name, "client_to_broker", frames, canonical=False, note=note)


def _request(kind: str, name: str, fields: dict[str, Any]) -> Vector:
    """A request as an untyped map: ours would refuse to build some of them."""
    body = {"t": kind.upper()} | ({} if kind == "ping" else {"rid": RID}) | fields
    if kind == "hello":
        del body["rid"]
    frames = [limits.PREAMBLE, msgspec.msgpack.encode(body)]
    return _vector(f"{kind}_{name}", frames)


def _broken_frames() -> Iterator[Vector]:
    p = limits.PREAMBLE
    for name, frames in {
        "no_frames": [],
        "preamble_only": [p],
        "too_many_frames": [p, PING, b"", b"", b""],
        "undeclared_raw_buffer": [p, PING, b"\0\0\0\0"],
        "empty_preamble": [b"", PING],
        "other_preamble": [b"HTTP", PING],
        "short_preamble": [p[:3], PING],
        "long_preamble": [p + b"\0", PING],
        "swapped_frames": [PING, p],
        "next_major": [p[:3] + bytes([limits.PROTOCOL_MAJOR + 1]), PING],
        "major_zero": [p[:3] + b"\0", PING],
    }.items():
        yield _vector(name, frames)


def _broken_maps() -> Iterator[Vector]:
    rid = b"\xa3rid\xc4\x10" + RID
    decode = b"\x84\xa1t\xa6DECODE" + rid + b"\xa5agent\xa5coder"
    for name, body in {
        "empty_map_frame": b"",
        "empty_map": b"\x80",
        "truncated": PING[:-1],
        "trailing_byte": PING + b"\xc0",
        "two_maps": PING + PING,
        "array_instead_of_map": b"\x91\xa4PING",
        "nil": b"\xc0",
        "never_used_byte": b"\xc1",
        "json": b'{"t":"PING"}',
        "pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        "type_missing": b"\x81\xa1n\x07",
        "type_unknown": b"\x81\xa1t\xa5SLEEP",
        "type_lower_case": b"\x81\xa1t\xa4ping",
        "type_int": b"\x81\xa1t\x07",
        "type_nil": b"\x81\xa1t\xc0",
        "type_twice": b"\x82\xa1t\xa4PING\xa1t\xa3BYE",
        "type_of_the_other_direction": b"\x82\xa1t\xa4PONG\xa1n\x07",
        "type_of_a_worker": b"\x83\xa1t\xa6W_PING\xa1n\x07\xa5steps\x00",
        "int_key": b"\x82\xa1t\xa4PING\x01\x07",
        "bin_key": b"\x82\xa1t\xa4PING\xc4\x01n\x07",
        "invalid_utf8": b"\x83\xa1t\xa5HELLO\xa1v\x92\x01\x00\xa6client\xa2\xc3\x28",
        "utf8_surrogate": b"\x83\xa1t\xa5HELLO\xa1v\x92\x01\x00\xa6client\xa3\xed\xa0\x80",
        "utf8_overlong": b"\x83\xa1t\xa5HELLO\xa1v\x92\x01\x00\xa6client\xa2\xc0\xaf",
        "str_as_int": b"\x82\xa1t\xa4PING\xa1n\xa17",
        "float_as_int": b"\x82\xa1t\xa4PING\xa1n\xcb\x40\x1c\0\0\0\0\0\0",
        "bool_as_int": b"\x82\xa1t\xa4PING\xa1n\xc3",
        "ext_as_int": b"\x82\xa1t\xa4PING\xa1n\xd4\x05a",
        "nil_as_int": b"\x82\xa1t\xa4PING\xa1n\xc0",
        "rid_missing": b"\x81\xa1t\xa6STATUS",
        "rid_as_str": b"\x82\xa1t\xa6STATUS\xa3rid\xb0" + b"0" * 16,
        "version_one_number": b"\x82\xa1t\xa5HELLO\xa1v\x91\x01",
        "length_bomb_map": b"\xdf\xff\xff\xff\xff\xa1t\xa4PING",
        "length_bomb_array": decode + b"\xa6tokens\xdd\xff\xff\xff\xff\x01",
        "length_bomb_str": decode + b"\xa6prompt\xdb\xff\xff\xff\xffhi",
        "length_bomb_bin": b"\x82\xa1t\xa6STATUS\xa3rid\xc6\xff\xff\xff\xff00",
    }.items():
        yield _vector(name, [limits.PREAMBLE, body])


def _broken_free_form() -> Iterator[Vector]:
    head = b"\x83\xa1t\xa2OK\xa3rid\xc4\x10" + RID + b"\xa4body\x81\xa1x"
    deep = limits.NESTING_MAX
    for name, value in {
        "body_too_deep": b"\x91" * deep + b"\xc0",
        "body_bottomless": b"\x91" * 2000 + b"\xc0",
        "body_ext": b"\xd4\x05a",
        "body_timestamp": b"\xd6\xff\0\0\0\x05",
        "body_int_key": b"\x81\x01\x02",
        "body_array_key": b"\x81\x90\x02",
    }.items():
        frames = [limits.PREAMBLE, head + value]
        yield Vector(name, "broker_to_client", frames, canonical=False)


def _bad_requests() -> dict[str, dict[str, Any]]:
    nan, inf = float("nan"), float("inf")
    return {
        "rid_short": {"rid": RID[:15]},
        "rid_long": {"rid": RID + b"\0"},
        "rid_empty": {"rid": b""},
        "agent_empty": {"agent": ""},
        "agent_too_long": {"agent": "a" * (limits.NAME_CHARS_MAX + 1)},
        "agent_slash": {"agent": "a/b"},
        "agent_dots": {"agent": "../x"},
        "agent_newline": {"agent": "coder\n"},
        "agent_not_ascii": {"agent": "cödér"},
        "conversation_space": {"conversation": "a b"},
        "no_input": {"prompt": None},
        "two_inputs": {"tokens": [1]},
        "three_inputs": {"tokens": [], "messages": []},
        "prompt_empty": {"prompt": ""},
        "messages_empty": {"prompt": None, "messages": []},
        "tokens_empty": {"prompt": None, "tokens": []},
        "token_negative": {"prompt": None, "tokens": [1, -1]},
        "token_beyond_int32": {"prompt": None, "tokens": [2**31]},
        "role_empty": {"prompt": None, "messages": [{"role": "", "content": "x"}]},
        "role_unprintable": {"prompt": None, "messages": [{"role": "user\n", "content": "x"}]},
        "role_too_long": {"prompt": None, "messages": [{"role": "r" * 65, "content": "x"}]},
        "message_without_content": {"prompt": None, "messages": [{"role": "user"}]},
        "message_content_nil": {"prompt": None, "messages": [{"role": "user", "content": None}]},
        "max_tokens_zero": {"max_tokens": 0},
        "max_tokens_negative": {"max_tokens": -1},
        "max_tokens_too_many": {"max_tokens": limits.MAX_TOKENS_MAX + 1},
        "max_tokens_uint64": {"max_tokens": 2**64 - 1},
        "stop_empty_string": {"stop": [""]},
        "stop_too_many": {"stop": ["x"] * (limits.STOP_STRINGS_MAX + 1)},
        "stop_too_long": {"stop": ["x" * (limits.STOP_STRING_CHARS_MAX + 1)]},
        "bias_token_negative": {"logit_bias": [[-1, 0.0]]},
        "bias_nan": {"logit_bias": [[1, nan]]},
        "bias_inf": {"logit_bias": [[1, -inf]]},
        "bias_too_many": {"logit_bias": [[1, 0.0]] * (limits.LOGIT_BIAS_MAX + 1)},
        "bias_triple": {"logit_bias": [[1, 0.0, 0]]},
        "window_negative": {"window": -1},
        "expect_version_negative": {"expect_version": -1},
        "queue_ms_negative": {"queue_ms": -1},
        "timeout_ms_zero": {"timeout_ms": 0},
        "timeout_ms_too_long": {"timeout_ms": limits.TIME_MS_MAX + 1},
        "priority_too_high": {"priority": limits.PRIORITY_MAX + 1},
        "overflow_shift": {"overflow": "shift"},
        "overflow_unknown": {"overflow": "truncate"},
        **structure_cases.bad_requests(),
    }


def _bad_sampling() -> dict[str, dict[str, Any]]:
    bad: dict[str, list[Any]] = {
        "temperature": [-0.1, float("nan"), float("inf"), 1e9],
        "top_k": [-1],
        "top_p": [0.0, 1.01, float("nan")],
        "min_p": [-0.01, 1.01],
        "repeat_penalty": [0.0, -1.0, float("nan")],
        "presence_penalty": [-2.5, 2.5],
        "frequency_penalty": [2.5, float("nan")],
        "penalty_last_n": [-2],
        "seed": [-1, 2**32],
    }
    return {
        f"sampling_{field}_{value}": {"sampling": {field: value}}
        for field, values in bad.items()
        for value in values
    }


def _bad_registers() -> dict[str, dict[str, Any]]:
    return {
        "n_ctx_zero": {"n_ctx": 0},
        "n_ctx_negative": {"n_ctx": -4096},
        "n_ctx_too_large": {"n_ctx": limits.N_CTX_MAX + 1},
        "n_ctx_text": {"n_ctx": "4096"},
        "kv_type_unknown": {"kv_type": "q3_k"},
        "slots_zero": {"slots": 0},
        "slots_too_many": {"slots": limits.SLOTS_MAX + 1},
        "model_empty": {"model": ""},
        "model_nul": {"model": "/models/a\0b.gguf"},
        "model_too_long": {"model": "m" * (limits.MODEL_CHARS_MAX + 1)},
        "device_empty": {"device": ""},
        "device_slash": {"device": "/dev/nvidia0"},
        "ttl_zero": {"ttl_s": 0},
        "ttl_too_long": {"ttl_s": limits.TTL_S_MAX + 1},
        "linger_negative": {"linger_s": -1},
        "linger_too_long": {"linger_s": limits.LINGER_S_MAX + 1},
        "linger_float": {"linger_s": 0.5},
        "priority_too_low": {"priority": -limits.PRIORITY_MAX - 1},
        "sampling_nan": {"sampling": {"temperature": float("nan")}},
    }


def _bad_others() -> list[tuple[str, str, dict[str, Any]]]:
    major = limits.PROTOCOL_MAJOR
    return [
        ("hello", "next_major", {"v": [major + 1, 0]}),
        ("hello", "negative_version", {"v": [-1, 0]}),
        ("hello", "client_too_long", {"v": [major, 0], "client": "x" * 129}),
        ("hello", "feature_no_name", {"v": [major, 0], "features": ["a b"]}),
        ("hello", "too_many_features", {"v": [major, 0], "features": ["x"] * 65}),
        ("unregister", "agent_empty", {"agent": ""}),
        ("list", "rid_short", {"rid": b"1"}),
        ("credit", "ack_negative", {"ack": -1, "upto": 1}),
        ("credit", "upto_negative", {"ack": 0, "upto": -1}),
        ("credit", "upto_missing", {"ack": 0}),
        ("cancel", "rid_long", {"rid": b"1" * 17}),
        ("resume", "from_seq_negative", {"from_seq": -1}),
        ("resume", "window_negative", {"window": -1}),
        ("reset", "conversation_empty", {"agent": "coder", "conversation": ""}),
        ("fork", "to_missing", {"agent": "coder"}),
        ("fork", "to_slash", {"agent": "coder", "to": "other/coder/main"}),
        ("fork", "version_negative", {"agent": "coder", "to": "side", "expect_version": -1}),
        ("history", "agent_missing", {}),
        ("history", "turn_negative", {"agent": "coder", "from_turn": -1}),
        ("history", "token_float", {"agent": "coder", "from_token": 0.5}),
        ("history", "name_slash", {"agent": "coder", "conversation": "../main"}),
        ("lease", "no_bytes", {"name": "train"}),
        ("lease", "bytes_negative", {"name": "train", "bytes": -1}),
        ("lease", "bytes_absurd", {"name": "train", "bytes": limits.BYTES_MAX + 1}),
        ("lease", "bytes_float", {"name": "train", "bytes": 1e9}),
        ("lease", "bytes_text", {"name": "train", "bytes": "3 GB"}),
        ("lease", "ttl_zero", {"name": "train", "bytes": 1, "ttl_s": 0}),
        ("lease", "ttl_nan", {"name": "train", "bytes": 1, "ttl_s": float("nan")}),
        ("lease", "ttl_nil", {"name": "train", "bytes": 1, "ttl_s": None}),
        ("lease", "ttl_too_long", {"name": "t", "bytes": 1, "ttl_s": limits.LEASE_TTL_S_MAX + 1}),
        ("lease", "name_slash", {"name": "local/train", "bytes": 1}),
        ("lease", "principal_slash", {"name": "train", "principal": "alice/train"}),
        ("lease", "name_missing", {"bytes": 1}),
        ("lease", "device_empty", {"name": "train", "bytes": 1, "device": ""}),
        ("drain_device", "device_missing", {}),
        ("drain_device", "device_slash", {"device": "../cpu"}),
        ("drain_device", "epoch_negative", {"device": "cpu", "worker_epoch": -1}),
        ("drain_device", "drain_negative", {"device": "cpu", "drain_ms": -1}),
        ("drain_device", "drain_text", {"device": "cpu", "drain_ms": "10s"}),
        ("drain_device", "hold_float", {"device": "cpu", "hold_ms": 0.5}),
        ("drain_device", "hold_too_long", {"device": "cpu", "hold_ms": limits.TIME_MS_MAX + 1}),
        *fit_cases.bad_requests(),
        ("ping", "negative", {"n": -1}),
    ]


def _broken_worker_messages() -> Iterator[Vector]:
    sound = {vector.name: vector for vector in worker_vectors()}
    run, started = sound["run_with_transcript"].frames, sound["started"].frames
    broken: list[tuple[str, Direction, list[bytes]]] = [
        ("run_raw_missing", "broker_to_worker", run[:2]),
        ("run_raw_surplus", "broker_to_worker", [*run, b""]),
        ("started_raw_missing", "worker_to_broker", started[:2]),
        ("started_to_a_worker", "broker_to_worker", started),
        ("run_to_the_broker", "worker_to_broker", run),
    ]
    for name, direction, frames in broken:
        yield Vector(name, direction, frames, canonical=False)
