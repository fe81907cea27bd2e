"""A GGUF's own chat template, rendered in jinja2's sandbox. *Pure* (the clock is passed in).

A template is a program that came with a model file, so it gets what chat templates use and no
more: no attributes that lead out of the sandbox, a bounded number of steps (counted by a trace
function, so that no loop escapes), bounded strings, bounded output, bounded recursion.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Sequence, Sized
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vram_conductor.protocol.errors import FailedPrecondition, InvalidArgument
from vram_conductor.protocol.limits import PROMPT_CHARS_MAX
from vram_conductor.protocol.values import Message

STEPS_MAX = 3_000_000
"""Python lines that one rendering may run: about a second."""

VALUE_MAX = PROMPT_CHARS_MAX
"""Longest string or list, and largest number, that an operator may make."""

_WIDTH_MAX = 1000
_DROPPED_FILTERS = ("center", "filesizeformat", "format", "pprint", "random", "urlize", "wordwrap")
_PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill", "format", "format_map")


class _Limit(BaseException):
    """A limit was passed. No Exception, so that nothing on the way swallows it."""


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks assistant text for training: no effect."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Generator(CodeGenerator):
    """Routes ``~`` through the environment, where its result is bounded."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenate((")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write("))")


class _Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def concatenate(self, parts: Sequence[Any]) -> str:
        texts = [str(part) for part in parts]
        _bound(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            _bound(abs(left) if isinstance(left, int) else 2)
            _bound(abs(right) * 1000 if isinstance(right, int) else 0)
        elif operator == "*":
            _bound(_extent(left) * _extent(right))
        elif operator == "+":
            _bound(max(_extent(left), _extent(right)) * 2)
        elif isinstance(left, str):
            raise jinja2.TemplateError("the % operator on strings is not available here")
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format, so the name is all there is to go by.
        if getattr(obj, "__name__", "") in _PADDING:
            raise jinja2.TemplateError(f"{obj.__name__}() is not available here")
        return super().call(context, obj, *args, **kwargs)


def _extent(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(cast(Sized, value)) if isinstance(value, str | list | tuple) else 1


def _bound(size: int) -> None:
    if size > VALUE_MAX:
        raise _Limit(f"it makes a value of size {size}, the limit is {VALUE_MAX}")


class ChatTemplate:
    """A compiled template.

    Args:
        source: the template's text.
        bos, eos: text of the special tokens, empty where there is none.
        now: the local time, for templates that print the date.

    Raises:
        FailedPrecondition: ``bad_chat_template``: it does not compile.
    """

    def __init__(
        self, source: str, *, bos: str, eos: str, now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = _Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        for name in _DROPPED_FILTERS:
            environment.filters.pop(name, None)
        environment.filters["tojson"] = _tojson
        environment.filters["indent"] = _indent
        names: dict[str, Any] = environment.globals
        names["raise_exception"] = _refuse

        def formatted(form: str) -> str:
            return now().strftime(form)

        names["strftime_now"] = formatted
        names.pop("lipsum", None)
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise FailedPrecondition(
                "bad_chat_template",
                f"this model's chat template does not compile ({error}): send a prompt instead "
                "of messages",
            ) from None
        self._fixed = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Messages as prompt text; ``generate`` opens the assistant's turn at the end.

        Raises:
            InvalidArgument: ``bad_messages``: the template refuses them; ``template_limit``: too
                many steps, too much text or recursion.
        """
        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            with _counted():
                return self._collect(rows, generate)
        except (_Limit, RecursionError, MemoryError) as error:
            raise InvalidArgument(
                "template_limit",
                f"the chat template was stopped: {error or 'out of memory'}; send a prompt "
                "instead of messages, or fewer and shorter messages",
                messages=len(rows),
                steps_max=STEPS_MAX,
                chars_max=PROMPT_CHARS_MAX,
            ) from None
        except Exception as error:
            raise InvalidArgument(
                "bad_messages",
                f"the model's chat template refuses these messages: {error}",
                messages=len(rows),
            ) from None

    def _collect(self, rows: list[dict[str, str]], generate: bool) -> str:
        parts: list[str] = []
        total = 0
        for part in self._template.generate(
            messages=rows, add_generation_prompt=generate, **self._fixed
        ):
            parts.append(part)
            total += len(part)
            if total > PROMPT_CHARS_MAX:
                raise _Limit(f"its output exceeds {PROMPT_CHARS_MAX} characters")
        return "".join(parts)


@contextmanager
def _counted() -> Generator[None]:
    """Raise :class:`_Limit` in this thread after :data:`STEPS_MAX` lines of Python."""
    left = STEPS_MAX

    def step(_frame: FrameType, _event: str, _arg: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise _Limit(f"it ran more than {STEPS_MAX} steps")
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None, **_options: Any) -> str:
    """Plain JSON: jinja2's own escapes HTML, which models have not seen in training."""
    return json.dumps(value, ensure_ascii=False, indent=min(indent or 0, 8) or None)


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    pad = " " * min(width, _WIDTH_MAX)
    _bound(len(pad) * (text.count("\n") + 1))
    lines = text.split("\n")
    done = [pad + line if line or blank else line for line in lines[1:]]
    return "\n".join([pad + lines[0] if first else lines[0], *done])
