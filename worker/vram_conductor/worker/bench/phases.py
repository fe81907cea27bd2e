"""How long each part of a bench took, so that its time can be planned."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager


class Phases:
    """Seconds by name, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds to what there is under this name."""
        began = time.monotonic()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds[name] + time.monotonic() - began, 3)
