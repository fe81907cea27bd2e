"""A GGUF's own chat template, in jinja2's sandbox. *Pure* but for ``strftime_now``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.protocol.values import Message


class ChatTemplate:
    def __init__(self, source: str, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment.globals["raise_exception"] = refuse
        self._template = environment.from_string(source)
        self._fixed: dict[str, Any] = {"bos_token": bos, "eos_token": eos}

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        rows = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=rows, add_generation_prompt=generate, **self._fixed
            )
        except jinja2.TemplateError as error:
            raise InvalidArgument(
                "bad_messages", f"the chat template refuses these messages: {error}"
            ) from None
