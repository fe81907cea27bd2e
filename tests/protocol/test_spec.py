"""SPEC.md tells the truth: its tables are compared with the code."""

import ast
import re
import types
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pytest

from vram_conductor.protocol import (
    commands,
    conversations,
    drain,
    errors,
    fitting,
    limits,
    messages,
    replies,
    status,
    values,
)

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("protocol", "client", "broker", "worker")
SPEC = (ROOT / "protocol" / "SPEC.md").read_text("utf-8")
ERROR_NAMES = {
    name: str(kind.code)
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ConductorError)
}


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def tables(first_cell: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Every table whose header begins with ``first_cell``: (heading above it, rows)."""
    heading, rows, inside = "", list[list[str]](), False
    for line in [*SPEC.splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            if inside:
                yield heading, rows[1:]
            inside = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells[0] == first_cell:
            inside, rows = True, []
        elif inside:
            rows.append(cells)


# --- fields ---


def wire_type(kind: Any) -> str:
    """A type as the tables write it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = ", ".join(wire_type(each) for each in arguments if each is not type(None))
        return inner + (" or nil" if type(None) in arguments else "")
    if origin is typing.Literal:
        return " \\| ".join(f'`"{each}"`' for each in arguments)
    if origin is list:
        return f"list of {wire_type(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(wire_type(each) for each in arguments) + "]"
    if origin is dict:
        return "map"
    if kind is errors.Code:
        return "str"
    if kind is bytes:
        return "bin"
    if issubclass(kind, msgspec.Struct):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    name: str = kind.__name__
    return name


def wire_default(field: Any) -> str:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT:
        return "required"
    if default is None:
        return "nil"
    if isinstance(default, msgspec.Struct):
        return "`{}`"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def tagged(union: Any) -> dict[str, type[msgspec.Struct]]:
    return {str(kind.__struct_config__.tag): kind for kind in get_args(union)}


MESSAGES = (
    tagged(messages.ClientMessage)
    | tagged(messages.BrokerMessage)
    | tagged(commands.ToWorker)
    | tagged(commands.FromWorker)
)
STRUCTS = {
    name: kind
    for module in (values, errors, replies, status, conversations, drain, fitting)
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and issubclass(kind, msgspec.Struct)
    and kind.__module__ == module.__name__
    and kind.__struct_config__.tag is None
    and not kind.__struct_config__.array_like
    and kind.__struct_fields__
}


@pytest.mark.parametrize("name", [*MESSAGES, *STRUCTS])
def test_every_message_and_value_is_described_field_by_field(name: str) -> None:
    kind = (MESSAGES | STRUCTS)[name]
    assert f"\n#### {name}\n" in SPEC, f"SPEC.md has no section for {name}"
    written = {
        row[0].strip("`"): (row[1], row[2])
        for heading, rows in tables("field")
        if heading == name
        for row in rows
    }
    hints = typing.get_type_hints(kind)
    expected = {
        field.encode_name: (
            "bin(16)" if field.name == "rid" else wire_type(hints[field.name]),
            wire_default(field),
        )
        for field in msgspec.structs.fields(kind)
    }
    assert written == expected


def test_nothing_is_described_that_does_not_exist() -> None:
    described = {heading for heading, _ in tables("field")}
    assert described <= MESSAGES.keys() | STRUCTS.keys()


def test_array_keys_are_described() -> None:
    assert values.AgentKey.__struct_fields__ == ("principal", "agent")
    assert values.ConversationKey.__struct_fields__ == ("principal", "agent", "conversation")
    assert "`[principal, agent, conversation]`" in SPEC


# --- limits, codes, version, links ---


def test_every_limit_is_in_the_table_with_its_value() -> None:
    ((_, rows),) = tables("limit")
    written = {row[0].strip("`"): row[1] for row in rows}
    expected = {
        name: str(value)
        for name, value in vars(limits).items()
        if name.isupper() and isinstance(value, int | float)
    }
    assert written == expected


def test_every_code_is_in_the_table() -> None:
    written = next([row[0] for row in rows] for _, rows in tables("code"))
    assert written == [str(code) for code in errors.Code]


def test_the_version_is_that_of_the_code() -> None:
    version = f"{limits.PROTOCOL_MAJOR}.{limits.PROTOCOL_MINOR}"
    assert SPEC.startswith(f"# VRAM Conductor protocol, version {version}\n")
    assert f"`{limits.PREAMBLE.hex(' ').upper()}`" in SPEC


def test_every_link_inside_the_document_leads_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", SPEC, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 _-]", "", each.lower()).replace(" ", "-") for each in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", SPEC))
    assert links - anchors == set()


# --- reasons ---


class Reasons(ast.NodeVisitor):
    """The reasons of every error that a source file makes: reason → {(codes, place)}.

    A reason is a literal, a constant of some module, or a parameter called ``reason``, whose
    values are the literals in calls of that function in the same file.
    """

    def __init__(self, path: Path, tree: ast.Module, constants: dict[str, str]) -> None:
        self.path, self.tree, self.constants = path, tree, constants
        self.found: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self.unclear: list[str] = []
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = called(node)
        if name in ERROR_NAMES:
            code = next((k.value for k in node.keywords if k.arg == "code"), None)
            codes = ERROR_NAMES[name] if code is None else self.code(code)
            self.note(argument(node, 0), codes, node)
        elif name == "ErrorInfo" and argument(node, 1) is not None:
            self.note(argument(node, 1), self.code(argument(node, 0, "code")), node)

    def code(self, node: ast.expr | None) -> str:
        """``Code.X`` as "X"; empty if it is not written out."""
        text = "" if node is None else ast.unparse(node)
        return text.removeprefix("Code.") if text.startswith("Code.") else ""

    def note(self, node: ast.expr | None, code: str, call: ast.Call) -> None:
        place = f"{self.path.relative_to(ROOT)}:{call.lineno}"
        for reason in self.literals(node):
            self.found[reason].add((code, place))
        if node is not None and not self.literals(node) and self.path.name != "errors.py":
            self.unclear.append(f"{place}: write the reason as a literal: {ast.unparse(node)}")

    def literals(self, node: ast.expr | None) -> list[str]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.IfExp):
            return self.literals(node.body) + self.literals(node.orelse)
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in self.constants:
                return [self.constants[name]]
            if name == "reason" and self.functions:
                return self.passed(self.functions[-1])
        return []

    def passed(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
        """Literals that callers in any file of the part pass as ``reason``."""
        names = [arg.arg for arg in function.args.args if arg.arg not in ("self", "cls")]
        if "reason" not in names:
            return []
        index = names.index("reason")
        reasons: list[str] = []
        for other in self.path.parent.rglob("*.py"):
            for node in ast.walk(ast.parse(other.read_text("utf-8"))):
                if isinstance(node, ast.Call) and called(node) == function.name:
                    value = argument(node, index, "reason")
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        reasons.append(value.value)
        return reasons


def called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def argument(node: ast.Call, index: int, name: str = "reason") -> ast.expr | None:
    if len(node.args) > index:
        return node.args[index]
    return next((k.value for k in node.keywords if k.arg == name), None)


def string_constants(trees: dict[Path, ast.Module]) -> dict[str, str]:
    """Module-level ``NAME = "text"`` of all files."""
    found: dict[str, str] = {}
    for tree in trees.values():
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found[node.targets[0].id] = node.value.value
    return found


def collect() -> tuple[dict[str, set[tuple[str, str]]], list[str]]:
    trees = {
        path: ast.parse(path.read_text("utf-8"))
        for part in PARTS
        for path in sorted((ROOT / part).rglob("*.py"))
        if "vectors" not in path.parts
    }
    constants = string_constants(trees)
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    unclear: list[str] = []
    for path, tree in trees.items():
        reasons = Reasons(path, tree, constants)
        unclear += reasons.unclear
        for reason, places in reasons.found.items():
            found[reason] |= places
    return found, unclear


USED, UNCLEAR = collect()
LISTED = {
    row[0].strip("`"): [code.strip() for code in row[1].split(",")]
    for _, rows in tables("reason")
    for row in rows
}


def test_the_collector_finds_reasons_of_all_parts() -> None:
    for reason in ("bad_frames", "queue_full", "no_chat_template", "no_broker", errors.LEDGER_DENY):
        assert reason in USED


def test_every_reason_is_listed() -> None:
    report(
        [
            f"SPEC.md, Reasons: add | `{reason}` | {'/'.join(sorted({c for c, _ in places}))} |, "
            f"used in {', '.join(sorted(place for _, place in places)[:3])}"
            for reason, places in sorted(USED.items())
            if reason not in LISTED
        ]
    )


def test_every_listed_reason_is_used() -> None:
    report(
        [
            f"SPEC.md, Reasons: nothing uses `{reason}` any more; remove the row"
            for reason in sorted(LISTED.keys() - USED.keys())
        ]
    )


def test_every_reason_comes_with_a_listed_code() -> None:
    report(
        [
            f"{place}: `{reason}` comes with {code}, SPEC.md lists {', '.join(LISTED[reason])}"
            for reason, places in sorted(USED.items())
            for code, place in sorted(places)
            if code and reason in LISTED and code not in LISTED[reason]
        ]
    )


def test_reasons_are_written_out() -> None:
    report(UNCLEAR)


def test_reasons_are_lower_snake_case_and_listed_once() -> None:
    names = [row[0].strip("`") for _, rows in tables("reason") for row in rows]
    assert len(names) == len(set(names)), "listed twice"
    historical = {errors.LEDGER_DENY}
    bad = [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]*", name)]
    assert set(bad) == historical
