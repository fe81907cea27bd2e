"""Stands in for matplotlib, which is an extra."""

from __future__ import annotations

from typing import Any


class Canvas:
    """Takes whatever is drawn on it, as matplotlib would."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def draw(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if name != "subplots":
                return self
            count = arguments[1] if len(arguments) > 1 else 1
            if options.get("squeeze") is False:
                return self, [[self] * count]
            return self, (self if count == 1 else [self] * count)

        return draw
