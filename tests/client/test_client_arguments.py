"""Mistakes in arguments are typed errors before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scripted_broker import ScriptedBroker

from vram_conductor.client import Conductor, ConductorError, Message
from vram_conductor.client.requests import build_decode, build_register, checked_timeout_ms
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.limits import MAP_BYTES_MAX, MESSAGES_MAX

RID = bytes(16)

DECODES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no input": ({}, "bad_input", "messages"),
    "two inputs": ({"prompt": "x", "tokens": [1]}, "bad_input", "messages"),
    "empty prompt": ({"prompt": ""}, "empty_input", "prompt"),
    "empty messages": ({"messages": []}, "empty_input", "messages"),
    "empty tokens": ({"tokens": []}, "empty_input", "tokens"),
    "prompt of another type": ({"prompt": 7}, "bad_value", "prompt"),
    "half a surrogate pair": ({"prompt": "\ud800"}, "bad_value", "prompt"),
    "text as messages": ({"messages": "hi"}, "bad_value", "messages"),
    "message without content": ({"messages": [{"role": "user"}]}, "bad_value", "messages"),
    "content of another type": (
        {"messages": [{"role": "user", "content": 7}]},
        "bad_value",
        "messages",
    ),
    "token of another type": ({"tokens": [1, "x"]}, "bad_value", "tokens"),
    "float tokens": ({"tokens": np.array([0.5])}, "bad_value", "tokens"),
    "negative token": ({"tokens": [-1]}, "bad_value", "tokens[0]"),
    "huge token": ({"tokens": [2**70]}, "bad_value", "tokens[0]"),
    "no output": ({"prompt": "x", "max_tokens": 0}, "bad_value", "max_tokens"),
    "max_tokens of another type": ({"prompt": "x", "max_tokens": "5"}, "bad_value", "max_tokens"),
    "max_tokens is a truth value": ({"prompt": "x", "max_tokens": True}, "bad_value", "max_tokens"),
    "temperature": ({"prompt": "x", "temperature": -1}, "bad_value", "sampling.temperature"),
    "not a number": (
        {"prompt": "x", "temperature": float("nan")},
        "bad_value",
        "sampling.temperature",
    ),
    "top_p": ({"prompt": "x", "top_p": 0}, "bad_value", "sampling.top_p"),
    "seed": ({"prompt": "x", "seed": 2**32}, "bad_value", "sampling.seed"),
    "empty stop string": ({"prompt": "x", "stop": ""}, "bad_value", "stop[0]"),
    "window": ({"prompt": "x", "window": 0}, "bad_value", "window"),
    "conversation": ({"prompt": "x", "conversation": "a b"}, "bad_name", "conversation"),
    "timeout": ({"prompt": "x", "timeout_ms": 0}, "bad_value", "timeout_ms"),
    "overflow": ({"prompt": "x", "overflow": "shift"}, "unsupported_overflow", "overflow"),
    "too many messages": (
        {"messages": [Message("user", "x")] * (MESSAGES_MAX + 1)},
        "limit_exceeded",
        "messages",
    ),
}


@pytest.mark.parametrize(("options", "reason", "field"), DECODES.values(), ids=DECODES.keys())
def test_decode(options: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(ConductorError) as caught:
        build_decode(RID, "a", **options)
    assert caught.value.reason == reason
    assert caught.value.details["field"] == field


REGISTERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty name": ({"agent": "", "model": "m"}, "bad_name", "agent"),
    "name of another type": ({"agent": 7, "model": "m"}, "bad_value", "agent"),
    "empty model": ({"agent": "a", "model": ""}, "bad_value", "model"),
    "no context": ({"agent": "a", "model": "m", "n_ctx": 0}, "bad_value", "n_ctx"),
    "negative context": ({"agent": "a", "model": "m", "n_ctx": -5}, "bad_value", "n_ctx"),
    "endless context": ({"agent": "a", "model": "m", "n_ctx": 2**40}, "limit_exceeded", "n_ctx"),
    "cache type": ({"agent": "a", "model": "m", "kv_type": "f17"}, "bad_value", "kv_type"),
    "slots": ({"agent": "a", "model": "m", "slots": 0}, "bad_value", "slots"),
    "time to live": ({"agent": "a", "model": "m", "ttl_s": 0}, "bad_value", "ttl_s"),
}


@pytest.mark.parametrize(("options", "reason", "field"), REGISTERS.values(), ids=REGISTERS.keys())
def test_register(options: dict[str, Any], reason: str, field: str) -> None:
    with pytest.raises(ConductorError) as caught:
        build_register(RID, **options)
    assert caught.value.reason == reason
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_decode(RID, "a", prompt="x", tempature=1),  # type: ignore[call-arg]
        lambda: build_register(RID, "a", "m", max_tokens=1),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_keyword_is_named(build: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"tempature|max_tokens"):
        build()


def test_a_request_larger_than_a_message_may_be() -> None:
    # Every single message is below its own limit; together they are too long for one map.
    messages = [Message("user", "漢" * 500_000)] * 3 + [Message("user", "𝔘" * 400_000)] * 1
    assert sum(len(message.content.encode()) for message in messages) < MAP_BYTES_MAX
    build_decode(RID, "a", messages=messages)
    with pytest.raises(ConductorError) as caught:
        build_decode(RID, "a", messages=[Message("user", "𝔘" * 1_000_000)] * 2 + messages)
    assert caught.value.reason == "limit_exceeded"


def test_inputs_of_many_types() -> None:
    assert build_decode(RID, "a", tokens=np.array([1, 2], dtype=np.int32)).tokens == [1, 2]
    assert build_decode(RID, "a", tokens=(1, 2)).tokens == [1, 2]
    assert build_decode(RID, "a", tokens=range(3)).tokens == [0, 1, 2]
    mixed = build_decode(
        RID, "a", messages=(Message("user", "a"), {"role": "user", "content": "b"})
    )
    assert mixed.messages == [Message("user", "a"), Message("user", "b")]
    assert build_decode(RID, "a", prompt="x", stop=("a", "b")).stop == ["a", "b"]
    assert build_decode(RID, "a", prompt="x", max_tokens=None).max_tokens is None


def test_what_was_given_is_copied() -> None:
    tokens, stop = [1, 2], ["a"]
    decode = build_decode(RID, "a", tokens=tokens, stop=stop)
    tokens.append(3)
    stop.append("b")
    assert (decode.tokens, decode.stop) == ([1, 2], ["a"])


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), True, "5", None])
def test_timeouts_are_numbers_above_zero(seconds: Any) -> None:
    with pytest.raises(ConductorError) as caught:
        checked_timeout_ms("timeout_s", seconds)
    assert caught.value.reason == "bad_value"


def test_endless_timeouts_are_refused() -> None:
    with pytest.raises(ConductorError) as caught:
        checked_timeout_ms("timeout_s", float("inf"))
    assert caught.value.reason == "limit_exceeded"
    assert checked_timeout_ms("timeout_s", 0.0001) == 1


def test_nothing_is_sent_for_a_mistake(broker: ScriptedBroker) -> None:
    with Conductor(broker.endpoint) as conductor:
        before = len(broker.received)
        agent = conductor.agent("a")
        attempts: list[Callable[[], object]] = [
            lambda: agent.chat([{"role": "user", "content": "x"}], system="s"),
            lambda: agent.decode(prompt="x", max_tokens=-1),
            lambda: conductor.register("a b", "m"),
            lambda: conductor.register("a", "m", timeout_s=0),
            lambda: conductor.unregister("a b"),
            lambda: conductor.reset("a", "b c"),
            lambda: conductor.ping(-1),
        ]
        for attempt in attempts:
            with pytest.raises(ConductorError):
                attempt()
        conductor.ping()
        after = [message for _, message in broker.received[before:]]
        assert all(isinstance(message, wire.Ping) for message in after)
