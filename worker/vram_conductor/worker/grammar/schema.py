"""Which JSON schemas the conversion to a grammar honours whole. *Pure.*

The converter of llama-cpp-python passes over what it does not know, and over much of what it does
know where keywords meet. Here every keyword is either one that counts where it stands, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vram_conductor.protocol.errors import ConductorError, InvalidArgument, Unimplemented
from vram_conductor.protocol.plain import is_list, is_map

ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$comment",
        "$defs",
        "definitions",
    }
)
"""Keywords that say nothing about what is valid."""

FORMATS = frozenset({"uuid", "date", "time", "date-time"})
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}


def check_schema(schema: dict[str, Any]) -> None:
    """Raises InvalidArgument ``bad_json_schema`` (it is none, or nothing satisfies it),
    Unimplemented ``unsupported_json_schema``, with the place and the keyword."""
    walk = _Walk(schema)
    walk.visit({key: schema[key] for key in schema if key != "$id"}, "#")
    while walk.refs:
        ref = walk.refs.pop()
        if ref not in walk.seen:
            walk.seen.add(ref)
            walk.visit(target(schema, ref), ref)


class _Walk:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self.refs: list[str] = []
        self.seen: set[str] = set()

    def visit(self, schema: object, path: str) -> None:
        if not is_map(schema):
            raise _unsupported(path, "true" if schema is True else "false", "write an object")
        keys: set[str] = set(schema) - ANNOTATIONS
        kind = schema.get("type")
        if "$ref" in keys:
            _only(path, keys, "$ref")
            self._ref(schema["$ref"], path)
        elif "anyOf" in keys:
            _only(path, keys, "anyOf")
            for index, option in enumerate(_some(path, "anyOf", schema["anyOf"])):
                self.visit(option, f"{path}/anyOf/{index}")
        elif "const" in keys or "enum" in keys:
            _values(path, schema, keys)
        elif is_list(kind):
            _only(path, keys, "type")
            for each in _some(path, "type", kind):
                _known_type(path, each)
        elif kind == "object" or (kind is None and keys & {"properties", "additionalProperties"}):
            self._object(schema, keys, path)
        elif kind == "array" or (kind is None and keys & {"items", "prefixItems"}):
            self._array(schema, keys, path)
        elif kind == "string":
            _string(path, schema, keys)
        elif kind is not None:
            _known_type(path, kind)
            _only(path, keys, "type")
        else:
            _only(path, keys)

    def _ref(self, ref: object, path: str) -> None:
        if not isinstance(ref, str) or not ref.startswith("#/") or set("~%") & set(ref):
            raise _unsupported(path, "$ref", "name a part of this schema, as #/$defs/name")
        self.refs.append(ref)

    def _object(self, schema: dict[str, Any], keys: set[str], path: str) -> None:
        _only(path, keys, "type", "properties", "required", "additionalProperties")
        properties = schema.get("properties", {})
        if not is_map(properties):
            raise _bad(path, "properties is not an object")
        for name, value in properties.items():
            if not name:
                raise _unsupported(f"{path}/properties", '""', "give the property a name")
            self.visit(value, f"{path}/properties/{name}")
        required = schema.get("required", [])
        if not is_list(required):
            raise _bad(path, "required is not a list")
        for name in required:
            if not isinstance(name, str):
                raise _bad(path, "required is a list of names")
            if name not in properties:
                raise _unsupported(path, "required", f"describe {name!r} in properties, too")
        additional = schema.get("additionalProperties", False)
        if additional is not False and properties:
            raise _unsupported(
                path,
                "additionalProperties",
                "beside properties only false works: a name could come twice",
            )
        if not isinstance(additional, bool):
            self.visit(additional, f"{path}/additionalProperties")

    def _array(self, schema: dict[str, Any], keys: set[str], path: str) -> None:
        _only(path, keys, "type", "items", "prefixItems", "minItems", "maxItems")
        least, most = _bounds(path, schema, "minItems", "maxItems")
        if "prefixItems" in keys:
            items = _some(path, "prefixItems", schema["prefixItems"])
            for index, item in enumerate(items):
                self.visit(item, f"{path}/prefixItems/{index}")
            if schema.get("items", False) is not False:
                raise _unsupported(path, "items", "beside prefixItems only false works")
            for keyword, count in (("minItems", least), ("maxItems", most)):
                if keyword in keys and count != len(items):
                    raise _unsupported(path, keyword, "beside prefixItems it is their number")
        elif "items" in keys:
            self.visit(schema["items"], f"{path}/items")
        else:
            for keyword in ("minItems", "maxItems"):
                if keyword in keys:
                    raise _unsupported(path, keyword, "say what the items are, too")


def _values(path: str, schema: dict[str, Any], keys: set[str]) -> None:
    keyword = "const" if "const" in keys else "enum"
    _only(path, keys, keyword, "type")
    values = [schema["const"]] if keyword == "const" else _some(path, "enum", schema["enum"])
    if "type" in keys:
        kind = schema["type"]
        kinds = kind if is_list(kind) else [kind]
        for each in kinds:
            _known_type(path, each)
        for value in values:
            if not any(_is(value, each) for each in kinds):
                raise _bad(path, f"a value of {keyword} is not of the type that it must have")


def _string(path: str, schema: dict[str, Any], keys: set[str]) -> None:
    if "format" in keys:
        _only(path, keys, "type", "format")
        if str(schema["format"]) not in FORMATS:
            raise _unsupported(path, "format", f"known are {', '.join(sorted(FORMATS))}")
    else:
        _only(path, keys, "type", "minLength", "maxLength")
        _bounds(path, schema, "minLength", "maxLength")


def _only(path: str, keys: set[str], *known: str) -> None:
    for keyword in sorted(keys - set(known)):
        beside = f"beside {known[0]}, " if known and known[0] != "type" else ""
        raise _unsupported(path, keyword, f"{beside}leave it out, or write a grammar")


def _some(path: str, keyword: str, value: object) -> list[Any]:
    if not is_list(value) or not value:
        raise _bad(path, f"{keyword} is a list with at least one entry")
    return value


def _known_type(path: str, kind: object) -> None:
    if not isinstance(kind, str) or kind not in _TYPES:
        raise _bad(path, f"type is one of {', '.join(_TYPES)}, not {str(kind)[:80]!r}")


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    whole = isinstance(value, float) and value.is_integer() and kind == "integer"
    return whole or isinstance(value, _TYPES[kind])


def _bounds(path: str, schema: dict[str, Any], low: str, high: str) -> tuple[int, int | None]:
    for keyword in (low, high):
        value = schema.get(keyword, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _bad(path, f"{keyword} is a number of at least 0")
    least, most = schema.get(low, 0), schema.get(high)
    if most is not None and most < least:
        raise _bad(path, f"{high} is less than {low}")
    return least, most


def target(root: dict[str, Any], ref: str) -> Any:
    """What a ``$ref`` names. Raises InvalidArgument ``bad_json_schema``: nothing."""
    place: Any = root
    for name in ref.split("/")[1:]:
        if not is_map(place) or name not in place:
            raise _bad(ref, "there is nothing at this $ref")
        place = place[name]
    return place


def _bad(path: str, why: str) -> InvalidArgument:
    path = path[:200]
    return InvalidArgument("bad_json_schema", f"json_schema at {path}: {why}", path=path)


def _unsupported(path: str, keyword: str, hint: str) -> ConductorError:
    path, keyword = path[:200], keyword[:80]
    return Unimplemented(
        "unsupported_json_schema",
        f"json_schema at {path}: {keyword} cannot be enforced here; {hint}",
        path=path,
        keyword=keyword,
    )


def texts_of(value: object) -> Iterable[str]:
    """All texts in a JSON value, names included."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif is_map(item):
            yield from item
            todo += item.values()
        elif is_list(item):
            todo += item
