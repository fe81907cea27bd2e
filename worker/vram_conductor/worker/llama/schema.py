"""JSON schema → GBNF, with llama-cpp-python's converter and its mistakes put right.

As of 0.3.36 it leaves backslashes in literals as they are, allows control characters within
strings, confuses a ``$ref`` with whatever rule has its last name, and writes counted repetitions
as nested parentheses.
"""

from __future__ import annotations

import json
from typing import Any

from llama_cpp.llama_grammar import PRIMITIVE_RULES, RESERVED_NAMES, BuiltinRule, SchemaConverter

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.grammar.constraint import Constraint
from vram_conductor.worker.grammar.schema import ANNOTATIONS, check_schema, target, texts_of
from vram_conductor.worker.grammar.tokens import TokenTexts

_library: Any = SchemaConverter
"""Its methods have no annotations."""

_CHAR = BuiltinRule(
    r'[^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | '
    "[dD] [0-7] [0-9a-fA-F]{2}))",
    [],
)
"""One character of a JSON string (RFC 8259, section 7), without halves of surrogate pairs."""


def schema_grammar(schema: dict[str, Any]) -> str:
    """GBNF of what ``schema`` describes; every text that follows it is valid.

    Raises:
        InvalidArgument: ``bad_json_schema``.
        Unimplemented: ``unsupported_json_schema``: a keyword that would have to be ignored.
    """
    check_schema(schema)
    try:
        converter = _Converter(schema)
        converter.visit(schema, "")
        return str(_library.format_grammar(converter))
    except Exception as error:
        # Its assertions are its way to refuse; a schema with very many optional properties
        # exceeds the depth of its recursion.
        raise InvalidArgument(
            "bad_json_schema",
            f"json_schema cannot be converted: {type(error).__name__}: {str(error)[:200]}",
        ) from None


def schema_constraint(schema: dict[str, Any], texts: TokenTexts) -> Constraint:
    """What holds an answer to ``schema``; raises what :func:`schema_grammar` does, and OutOfRange
    ``grammar_too_complex``."""
    grammar = schema_grammar(schema)
    try:
        return Constraint(grammar, texts)
    except InvalidArgument as error:
        # A $ref to itself: nothing is ever said. Whoever sent a schema knows of no grammar.
        raise InvalidArgument(
            "bad_json_schema", f"json_schema cannot be satisfied: {error.info.message}"
        ) from None


class _Converter(SchemaConverter):
    """The library's converter; what is overridden here says why."""

    def __init__(self, schema: dict[str, Any]) -> None:
        _library.__init__(self, prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        # A name that no property and no other rule can have.
        self._prefix = "reference"
        texts = list(texts_of(schema))
        while any(self._prefix in text for text in texts):
            self._prefix += "x"
        self._schema = schema
        self._names: dict[str, str] = {}

    def _format_literal(self, literal: str) -> str:
        """``literal`` is JSON. Backslashes count; characters stand for themselves."""
        text = json.dumps(json.loads(literal), ensure_ascii=False)
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    def _resolve_ref(self, ref: str) -> str:
        """One name for each target, known before the target is visited: it may contain itself."""
        name = self._names.get(ref)
        if name is None:
            name = self._names[ref] = f"{self._prefix}-{len(self._names)}"
            found = self.visit(target(self._schema, ref), name)
            if found != name:
                self._rules[name] = found
        return name

    def _add_primitive(self, name: str, rule: Any) -> str:
        is_char = rule is PRIMITIVE_RULES["char"]
        return str(super()._add_primitive(name, _CHAR if is_char else rule))

    def visit(self, schema: dict[str, Any], name: str) -> str:
        """The rule of a schema. Repetitions as counts, and any value where nothing is said."""
        said = schema.keys() - ANNOTATIONS - {"$id"}
        kind = schema.get("type")
        nests = isinstance(schema.get("items"), dict)
        if not said:
            content = self._add_primitive("value", PRIMITIVE_RULES["value"])
        elif kind == "string" and said & {"minLength", "maxLength"}:
            char = self._add_primitive("char", PRIMITIVE_RULES["char"])
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            content = rf'"\"" {char}{{{least},{most}}} "\"" space'
        elif nests:
            item = self.visit(schema["items"], f"{name}{'-' if name else ''}item")
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            content = f'"[" space {_listed(item, least, most)}"]" space'
        else:
            return str(_library.visit(self, schema, name))
        rule_name = f"{name}-" if name in RESERVED_NAMES else name or "root"
        return str(_library._add_rule(self, rule_name, content))


def _listed(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
    series = f'{item} ("," space {item}){more}'
    return f"{series} " if least else f"({series})? "
