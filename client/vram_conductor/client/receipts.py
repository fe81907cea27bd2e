"""What the demo claims, each claim with its figures and whether it held."""

from __future__ import annotations

from dataclasses import dataclass

from vram_conductor.client.output import Output
from vram_conductor.client.text import table


@dataclass(frozen=True)
class Receipt:
    """One checked claim; ``figures`` is what was measured."""

    claim: str
    holds: bool
    figures: str


class Receipts:
    """Collects and prints receipts as they come in."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.all: list[Receipt] = []

    def heading(self, text: str) -> None:
        """Start a section."""
        self._output.text(f"\n== {text}")

    def say(self, text: str) -> None:
        """Indented lines of explanation."""
        for line in text.splitlines():
            self._output.text(f"   {line}")

    def stream(self, text: str) -> None:
        """Text as it comes, without a line break."""
        self._output.text(text, end="")

    def check(self, claim: str, holds: bool, figures: str) -> bool:
        """Record a claim; returns whether it held."""
        self.all.append(Receipt(claim, holds, figures))
        self._output.text(f"   {'[ok]  ' if holds else '[FAIL]'} {claim}: {figures}")
        return holds

    @property
    def failed(self) -> int:
        """How many claims did not hold."""
        return sum(not receipt.holds for receipt in self.all)

    def closing(self) -> str:
        """All receipts as a table."""
        rows = [[("ok" if r.holds else "FAIL"), r.claim, r.figures] for r in self.all]
        return table(["", "claim", "measured"], rows)
