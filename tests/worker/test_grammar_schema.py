"""JSON schemas as grammars: what is written by them is valid, what they cannot say is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.protocol.errors import Code, ConductorError
from vram_conductor.protocol.plain import is_list, is_map
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.grammar.tokens import TokenTexts
from vram_conductor.worker.llama.schema import schema_constraint

CHARS = [chr(code) for code in range(32, 127)] + ["\n", "\t", "é", "日", "😀", "\x00", "\x7f"]
TEXTS = TokenTexts([b"", *(char.encode() for char in CHARS)], [0])
STEPS_MAX = 3000


def wander(constraint: Constraint, draw: random.Random) -> str:
    """A text by the grammar; any, but with a wish to end."""
    text = ""
    for _ in range(STEPS_MAX):
        allowed: list[int] = constraint.allowed().tolist()
        assert allowed, f"a dead end after {text!r}"
        if allowed[0] == 0 and (len(allowed) == 1 or draw.random() < 0.7):
            return text
        closing = [token for token in allowed if token and CHARS[token - 1] in '"}]']
        if not closing or draw.random() > 0.4:
            closing = [token for token in allowed if token]
        token = draw.choice(closing)
        text += CHARS[token - 1]
        constraint.accept(token)
    raise AssertionError(f"it never ends: {text[:200]!r}")


def is_valid(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """JSON Schema's rules, as far as the tests use them."""
    if "$ref" in schema:
        target = root
        for name in schema["$ref"].split("/")[1:]:
            target = target[name]
        return is_valid(value, target, root)
    if "anyOf" in schema:
        return any(is_valid(value, option, root) for option in schema["anyOf"])
    if "const" in schema:
        return same(value, schema["const"])
    if "enum" in schema:
        return any(same(value, each) for each in schema["enum"])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    right_kind = not kinds or any(is_of(value, kind) for kind in kinds)
    return right_kind and has_parts(value, schema, root)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def is_of(value: Any, kind: str) -> bool:
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    right: bool = isinstance(value, types[kind])
    return right and isinstance(value, bool) == (kind == "boolean")


def has_parts(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    if isinstance(value, str):
        return len(value) in range(schema.get("minLength", 0), schema.get("maxLength", 1 << 30) + 1)
    if is_list(value):
        parts: list[Any] = schema.get("prefixItems") or [schema.get("items") or {}] * len(value)
        return (
            len(value) in range(schema.get("minItems", 0), schema.get("maxItems", 1 << 30) + 1)
            and len(parts) == len(value)
            and all(is_valid(v, part, root) for v, part in zip(value, parts, strict=True))
        )
    if is_map(value):
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", not known)
        return set(schema.get("required", [])) <= set(value) and all(
            is_valid(part, known[name], root)
            if name in known
            else more is True or (isinstance(more, dict) and is_valid(part, more, root))
            for name, part in value.items()
        )
    return True


NAMES = st.sampled_from(
    [
        "a",
        "b-c",
        "b_c",
        "root",
        "string",
        "node",
        "item",
        "value",
        "kv",
        "é",
        'q"\\',
        "\n",
        "#",
        "0",
    ]
)
VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -5, 1.5, "", "x", 'a"b\\', "é\n", [1, "a"], {"k": []}]
)
PLAIN = st.one_of(
    st.sampled_from(["string", "number", "integer", "boolean", "null", "array", "object"]).map(
        lambda kind: {"type": kind}
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 4)).map(
        lambda two: {"type": "string", "minLength": two[0], "maxLength": sum(two)}
    ),
    st.integers(0, 3).map(lambda least: {"type": "string", "minLength": least}),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.just({"type": ["string", "null"], "title": "either"}),
    st.just({"$ref": "#/$defs/node"}),
    st.just({"$ref": "#/$defs/deep/string"}),
    st.just({}),
)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def of(properties: dict[str, Any], required: set[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(required & set(properties)),
            "additionalProperties": False,
        }

    return st.builds(of, st.dictionaries(NAMES, inner, max_size=4), st.sets(NAMES))


SCHEMAS = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        objects(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False}
        ),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda three: {
                "type": "array",
                "items": three[0],
                "minItems": three[1],
                "maxItems": three[1] + three[2],
            }
        ),
        inner.map(lambda value: {"type": "object", "additionalProperties": value}),
    ),
    max_leaves=6,
)
DEFS = {
    "node": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "deep": {"string": {"enum": ["not a primitive"]}},
}


@given(SCHEMAS, st.integers(0, 1 << 30))
def test_whatever_is_written_by_a_schema_is_valid(schema: dict[str, Any], seed: int) -> None:
    root = {**schema, "$defs": DEFS}
    text = wander(schema_constraint(root, TEXTS), random.Random(seed))
    assert is_valid(json.loads(text), root, root), text


def test_a_reference_is_no_property_of_the_same_name() -> None:
    """The library's converter knows both by one name."""
    node = {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 1}
    schema = {
        "type": "object",
        "properties": {
            "node": {"enum": [1, 2]},
            "x": {"$ref": "#/$defs/node"},
        },
        "required": ["node", "x"],
        "$defs": {"node": {"anyOf": [{"type": "null"}, node]}},
    }
    for seed in range(20):
        value = json.loads(wander(schema_constraint(schema, TEXTS), random.Random(seed)))
        assert is_valid(value, schema, schema), value


def test_formats_have_their_shapes() -> None:
    shapes = {
        "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "date": r"\d{4}-\d\d-\d\d",
        "time": r"\d\d:\d\d:\d\d(\.\d{3})?(Z|[+-]\d\d:\d\d)",
    }
    shapes["date-time"] = f"{shapes['date']}T{shapes['time']}"
    for name, shape in shapes.items():
        for schema in (
            {"type": "string", "format": name},
            {"type": "array", "items": {"type": "string", "format": name}, "minItems": 1},
        ):
            value = json.loads(wander(schema_constraint(schema, TEXTS), random.Random(1)))
            for each in value if is_list(value) else [value]:
                assert re.fullmatch(shape, each), name


def test_what_is_annotated_counts_for_nothing() -> None:
    schema = {"$id": "x", "$schema": "y", "title": "t", "type": "null", "default": {"$ref": 5}}
    assert wander(schema_constraint(schema, TEXTS), random.Random(1)).strip() == "null"


UNSUPPORTED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "string", "pattern": "^a$"}, "#", "pattern"),
    ({"type": "string", "format": "email"}, "#", "format"),
    ({"type": "string", "format": ["date"]}, "#", "format"),
    ({"type": "string", "format": "date", "maxLength": 3}, "#", "maxLength"),
    ({"minLength": 3}, "#", "minLength"),
    ({"type": "integer", "minimum": 0}, "#", "minimum"),
    ({"type": "number", "multipleOf": 2}, "#", "multipleOf"),
    ({"oneOf": [{"type": "null"}]}, "#", "oneOf"),
    ({"allOf": [{"type": "null"}]}, "#", "allOf"),
    ({"not": {"type": "null"}}, "#", "not"),
    ({"if": {}, "then": {}}, "#", "if"),
    ({"anyOf": [{}], "type": "null"}, "#", "type"),
    ({"enum": ["a"], "minLength": 3}, "#", "minLength"),
    ({"type": ["string", "null"], "maxLength": 3}, "#", "maxLength"),
    ({"type": "object", "patternProperties": {}}, "#", "patternProperties"),
    ({"type": "object", "minProperties": 1}, "#", "minProperties"),
    ({"type": "object", "required": ["a"]}, "#", "required"),
    ({"properties": {"": {}}}, "#/properties", '""'),
    ({"properties": {"a": {}}, "additionalProperties": True}, "#", "additionalProperties"),
    ({"properties": {"a": True}}, "#/properties/a", "true"),
    ({"type": "array", "uniqueItems": True}, "#", "uniqueItems"),
    ({"type": "array", "minItems": 1}, "#", "minItems"),
    ({"prefixItems": [{}], "minItems": 3}, "#", "minItems"),
    ({"prefixItems": [{}], "items": {}}, "#", "items"),
    ({"type": "array", "items": {"contains": {}}}, "#/items", "contains"),
    ({"$ref": "https://example.org/schema"}, "#", "$ref"),
    ({"$ref": "#"}, "#", "$ref"),
    ({"$ref": "#/$defs/a", "type": "null", "$defs": {"a": {}}}, "#", "type"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"minimum": 3}}}, "#/$defs/a", "minimum"),
    ({"items": {"$id": "x"}}, "#/items", "$id"),
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"type": "text"}, "#"),
    ({"type": 5}, "#"),
    ({"type": []}, "#"),
    ({"enum": []}, "#"),
    ({"enum": "a"}, "#"),
    ({"enum": ["a"], "type": "integer"}, "#"),
    ({"const": True, "type": "integer"}, "#"),
    ({"anyOf": {}}, "#"),
    ({"properties": []}, "#"),
    ({"properties": {"a": {}}, "required": "a"}, "#"),
    ({"properties": {"a": {}}, "required": [["a"]]}, "#"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#"),
    ({"type": "string", "minLength": -1}, "#"),
    ({"items": {}, "maxItems": "3"}, "#"),
    ({"$ref": "#/$defs/nobody"}, "#/$defs/nobody"),
]


@pytest.mark.parametrize(("schema", "path", "keyword"), UNSUPPORTED)
def test_what_would_have_to_be_ignored_is_refused(
    schema: dict[str, Any], path: str, keyword: str
) -> None:
    with pytest.raises(ConductorError) as caught:
        schema_constraint(schema, TEXTS)
    error = caught.value
    assert (error.code, error.reason) == (Code.UNIMPLEMENTED, "unsupported_json_schema")
    assert error.details == {"path": path, "keyword": keyword}


@pytest.mark.parametrize(("schema", "path"), BAD)
def test_what_is_no_schema_is_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(ConductorError) as caught:
        schema_constraint(schema, TEXTS)
    error = caught.value
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "bad_json_schema")
    assert error.details == {"path": path}


def test_a_schema_too_large_for_the_converter_is_refused() -> None:
    """It recurses over optional properties."""
    wide = {"properties": {f"p{number}": {"type": "null"} for number in range(2000)}}
    with pytest.raises(ConductorError) as caught:
        schema_constraint(wide, TEXTS)
    assert caught.value.reason in ("bad_json_schema", "grammar_too_complex")
    all_of_them = {**wide, "required": list(wide["properties"])}
    with pytest.raises(ConductorError) as caught:
        schema_constraint(all_of_them, TEXTS)
    assert caught.value.reason == "grammar_too_complex"
