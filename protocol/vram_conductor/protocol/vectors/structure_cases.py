"""Messages about what an answer must look like, valid and invalid. *Pure.*"""

from __future__ import annotations

from typing import Any

import msgspec

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Run
from vram_conductor.protocol.messages import Decode, Done
from vram_conductor.protocol.values import ConversationKey, Usage

GRAMMAR = 'root ::= "yes" | "no" # é\n'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"größe": {"type": "integer"}, "tags": {"enum": ["a", None, True, -1, 0.5]}},
    "required": ["größe"],
    "additionalProperties": False,
}


def requests(rid: bytes) -> dict[str, msgspec.Struct]:
    """What a client asks."""
    ask = {"rid": rid, "agent": "coder", "prompt": "Well?"}
    return {
        "decode_grammar": msgspec.convert(ask | {"grammar": GRAMMAR}, Decode),
        "decode_json_schema": msgspec.convert(ask | {"json_schema": SCHEMA}, Decode),
        "decode_json_schema_empty": msgspec.convert(ask | {"json_schema": {}}, Decode),
    }


def answers(rid: bytes) -> dict[str, msgspec.Struct]:
    """What it is told."""
    usage = Usage(generated_tokens=1, stop_reason="grammar")
    return {"done_grammar": Done(rid=rid, seq=1, usage=usage)}


def commands(epoch: int) -> dict[str, tuple[msgspec.Struct, list[bytes]]]:
    """What the broker tells a worker."""
    run = Run(
        broker_epoch=epoch,
        op=15,
        job=4,
        conversation=ConversationKey("local", "coder", "main"),
        version=1,
        transcript_tokens=0,
        prompt="Well?",
    )
    return {
        "run_grammar": (msgspec.structs.replace(run, grammar=GRAMMAR), []),
        "run_json_schema": (msgspec.structs.replace(run, json_schema=SCHEMA), []),
    }


def bad_requests() -> dict[str, dict[str, Any]]:
    """Fields of a DECODE that is refused for them."""
    deep: dict[str, Any] = {}
    for _ in range(limits.SCHEMA_NESTING_MAX):
        deep = {"items": deep}
    return {
        "grammar_and_json_schema": {"grammar": GRAMMAR, "json_schema": SCHEMA},
        "grammar_empty": {"grammar": ""},
        "grammar_binary": {"grammar": GRAMMAR.encode()},
        "grammar_too_long": {"grammar": "#" * (limits.GRAMMAR_BYTES_MAX + 1)},
        "grammar_too_many_bytes": {"grammar": "#" + "é" * (limits.GRAMMAR_BYTES_MAX // 2)},
        "json_schema_text": {"json_schema": "{}"},
        "json_schema_list": {"json_schema": [SCHEMA]},
        "json_schema_binary_inside": {"json_schema": {"const": b"x"}},
        "json_schema_nan_inside": {"json_schema": {"enum": [float("nan")]}},
        "json_schema_int_key": {"json_schema": {"properties": {1: {}}}},
        "json_schema_too_deep": {"json_schema": deep},
        "json_schema_too_long": {"json_schema": {"title": "x" * limits.GRAMMAR_BYTES_MAX}},
    }
