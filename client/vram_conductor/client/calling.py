"""What the parts of ``Conductor`` and ``AsyncConductor`` ask of the whole: a request, an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vram_conductor.client.calls import CallMessage
from vram_conductor.client.effects import News

OnProgress = Callable[[News], None]
"""Called with what is told before the answer."""


class Calling:
    """Of ``Conductor``, which carries it out."""

    def _call(
        self,
        message: CallMessage,
        timeout_ms: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        raise NotImplementedError


class AsyncCalling:
    """Of ``AsyncConductor``, which carries it out."""

    async def _call(
        self,
        message: CallMessage,
        timeout_ms: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Any]:
        raise NotImplementedError
