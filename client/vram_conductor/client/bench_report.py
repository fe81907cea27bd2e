"""What a bench found: figures beside what is wanted of them, as a table and as JSON. *Pure.*"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vram_conductor.client.text import table, wrapped


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        what: in words.
        value: None if it could not be measured; ``note`` says why.
        unit: ``ms``, ``GB/s``, ``%``, ``x`` …
        wanted: what it should be at least or at most; None: it is for orientation only.
        relation: how value and wanted compare when it is good.
        key: its name in the JSON, for programs.
        digits: behind the point; None: about three in all.
    """

    key: str
    what: str
    value: float | None
    unit: str = ""
    wanted: float | None = None
    relation: Literal[">=", "<="] = "<="
    note: str = ""
    digits: int | None = None

    @property
    def reached(self) -> bool | None:
        """Whether it is as wanted; None if nothing was wanted or measured."""
        if self.wanted is None or self.value is None:
            return None
        if self.relation == ">=":
            return self.value >= self.wanted
        return self.value <= self.wanted

    def row(self) -> list[str]:
        """what, measured, wanted, verdict, note."""
        value = "-" if self.value is None else self._number(self.value)
        wanted = "" if self.wanted is None else f"{self.relation} {self._number(self.wanted)}"
        verdict = {True: "reached", False: "MISSED", None: ""}[self.reached]
        return [self.what, value, wanted, verdict, self.note]

    def _number(self, value: float) -> str:
        if self.digits is None:
            return number(value, self.unit)
        return f"{value:,.{self.digits}f} {self.unit}".rstrip()


@dataclass
class BenchReport:
    """All that one bench found.

    Attributes:
        bench: its name.
        device, device_name: where.
        setting: what it was run with.
        headline: the result in one line, where a bench has such a one.
        figures: the table.
        more: text below the table, for people; its values are in ``data``.
        data: series for pictures and for who wants to look closer.
        notes: what was left out, and why.
        failures: parts that ended with an error; the others are as good as without them.
    """

    bench: str
    device: str
    device_name: str = ""
    setting: dict[str, Any] = field(default_factory=dict)
    headline: str = ""
    figures: list[Figure] = field(default_factory=list)
    more: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        """One more row."""
        self.figures.append(figure)

    def figure(self, key: str) -> Figure | None:
        """The figure of that name, if there is one."""
        return next((figure for figure in self.figures if figure.key == key), None)

    def json(self) -> dict[str, Any]:
        """Plain values, the verdicts included."""
        return {
            "bench": self.bench,
            "device": self.device,
            "device_name": self.device_name,
            "setting": self.setting,
            "headline": self.headline,
            "figures": [
                {
                    "key": figure.key,
                    "what": figure.what,
                    "value": figure.value,
                    "unit": figure.unit,
                    "wanted": figure.wanted,
                    "relation": figure.relation,
                    "reached": figure.reached,
                    "note": figure.note,
                }
                for figure in self.figures
            ],
            "notes": self.notes,
            "failures": self.failures,
            "data": self.data,
        }

    def text(self, width: int) -> str:
        """The table for a terminal."""
        name = f" ({self.device_name})" if self.device_name else ""
        head = f"{self.bench} on {self.device}{name}"
        header = ["", "measured", "wanted", "", ""]
        rows = [figure.row() for figure in self.figures]
        kept = [at for at in range(5) if at < 2 or any(row[at] for row in rows)]
        lines = table(
            [header[at] for at in kept],
            [[row[at] for at in kept] for row in rows],
            right=(1,),
            width=width,
            wrap=(0, kept.index(4)) if 4 in kept else (0,),
        )
        said = [f"note: {note}" for note in self.notes]
        said += [f"FAILED: {failure}" for failure in self.failures]
        said = [wrapped(text, width, hanging=2) for text in said]
        parts = (self.headline, head, lines, self.more, *said)
        return "\n".join(part for part in parts if part)


def number(value: float, unit: str) -> str:
    """Three significant digits or so, with the unit."""
    size = abs(value)
    digits = 0 if size >= 100 or float(value).is_integer() else 1 if size >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` (0 to 1) of ``values`` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def median(values: Sequence[float]) -> float:
    """Of at least one value."""
    return float(statistics.median(values))
