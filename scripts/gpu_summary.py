"""How the steps of the GPU suite ended, and what its benches found, as Markdown. *Pure.*"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TAIL_LINES = 40
"""Of the log of a step that failed."""


@dataclass
class Outcome:
    """How a step ended."""

    name: str
    seconds: float
    code: int
    timed_out: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.timed_out:
            return "took too long"
        return "ok" if self.code == 0 else f"failed (exit code {self.code})"


def summary(outcomes: Sequence[Outcome], reports: Mapping[str, Any]) -> str:
    """Steps, then every figure beside what is wanted of it."""
    lines = ["# GPU suite", "", "| step | how it ended | s | |", "| --- | --- | --- | --- |"]
    for outcome in outcomes:
        last = _result_line(outcome)
        lines.append(f"| {outcome.name} | {outcome.verdict} | {outcome.seconds:.0f} | {last} |")
    for name, report in reports.items():
        head = f"{report['device']} {report['device_name']}".strip()
        lines += ["", f"## {name} on {head}", ""]
        lines += [report["headline"], ""] if report["headline"] else []
        lines += ["| what | measured | wanted | | |", "| --- | --- | --- | --- | --- |"]
        lines += [figure_row(figure) for figure in report["figures"]]
        lines += ["", *(f"- {note}" for note in report["notes"])]
        lines += [f"- **failed**: {failure}" for failure in report["failures"]]
    for outcome in outcomes:
        if outcome.verdict != "ok":
            tail = outcome.lines[-TAIL_LINES:]
            lines += ["", f"## end of the log of {outcome.name}", "", "```", *tail, "```"]
    return "\n".join(lines) + "\n"


def _result_line(outcome: Outcome) -> str:
    """What pytest says last; nothing for the others."""
    if outcome.name != "tests":
        return ""
    found = [line for line in outcome.lines if re.search(r"\d+ (passed|failed|skipped)", line)]
    return found[-1].strip("= ") if found else ""


def figure_row(figure: dict[str, Any]) -> str:
    """One line of a table: what, measured, wanted, verdict, note."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:,.4g} {figure['unit']}".strip()

    wanted = "" if figure["wanted"] is None else f"{figure['relation']} {shown(figure['wanted'])}"
    verdict = {True: "reached", False: "**missed**", None: ""}[figure["reached"]]
    cells = [figure["what"], shown(figure["value"]), wanted, verdict, figure["note"]]
    return "| " + " | ".join(cells) + " |"
