"""What the demo claims, each claim with its figures and whether it held."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from vram_conductor.client.output import Output
from vram_conductor.client.text import table

MARGIN = "   "


@dataclass(frozen=True)
class Receipt:
    """One checked claim; ``figures`` is what was measured."""

    claim: str
    holds: bool
    figures: str


class Receipts:
    """Collects and prints receipts as they come in. Thread-safe."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._lock = threading.Lock()
        self._streaming = False
        self._held: list[str] = []
        self.all: list[Receipt] = []

    def heading(self, text: str) -> None:
        """Start a section."""
        self._output.text(f"\n== {text}")

    def say(self, text: str) -> None:
        """Indented lines of explanation; they wait while a line is being streamed."""
        with self._lock:
            if self._streaming:
                self._held.append(text)
                return
        self._write(text)

    def stream(self, text: str) -> None:
        """Text as it comes; a line break ends the line."""
        with self._lock:
            self._output.text(text, end="")
            self._streaming = not text.endswith("\n")
            if self._streaming:
                return
            held, self._held = self._held, []
        for line in held:
            self._write(line)

    def end_line(self) -> None:
        """Finish a line that broke off."""
        if self._streaming:
            self.stream("\n")

    def check(self, claim: str, holds: bool, figures: str) -> bool:
        """Record a claim; returns whether it held."""
        self.all.append(Receipt(claim, holds, figures))
        self._write(f"{'[ok]  ' if holds else '[FAIL]'} {claim}: {figures}")
        return holds

    @property
    def failed(self) -> int:
        """How many claims did not hold."""
        return sum(not receipt.holds for receipt in self.all)

    def closing(self, width: int) -> str:
        """All receipts as a table of at most ``width`` columns."""
        rows = [[("ok" if r.holds else "FAIL"), r.claim, r.figures] for r in self.all]
        return table(["", "claim", "measured"], rows, width=width, wrap=(1, 2))

    def _write(self, text: str) -> None:
        for line in text.splitlines():
            self._output.text(f"{MARGIN}{line}".rstrip())
