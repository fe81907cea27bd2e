"""What a line of pip's output means for a progress line. Pure; standard library only."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NINJA = re.compile(r"\s*\[(\d+)/(\d+)\] ")
_MAKE = re.compile(r"\s*\[ *(\d+)%\] ")
_DOWNLOAD = re.compile(r"\s*Downloading (\S+?)(?:\.metadata)? \(([\d.]+) ([kMG]?B)\)")
_DIST = re.compile(r"(?:.*/)?(.+?)(?:-py\d|-cp\d|-none|\.tar|\.zip|\.whl)")
_WHEEL = re.compile(r"\s*Building (?:editable|wheel) for (\S+)")
_LARGE = {"MB": 1.0, "GB": 0.0}


@dataclass(frozen=True)
class Step:
    """A compiler has finished ``done`` of ``total`` (files, or percent where total is 100)."""

    done: int
    total: int


@dataclass(frozen=True)
class Doing:
    """What pip is busy with; ``large`` is worth a line in a log, too."""

    text: str
    large: bool = False


def read(line: str) -> Step | Doing | None:
    """The news in one line, or None."""
    if step := _NINJA.match(line):
        return Step(int(step[1]), int(step[2]))
    if share := _MAKE.match(line):
        return Step(int(share[1]), 100)
    if got := _DOWNLOAD.match(line):
        name = dist[1] if (dist := _DIST.match(got[1])) else got[1]
        large = got[3] in _LARGE and float(got[2]) >= _LARGE[got[3]]
        return Doing(f"downloading {name} ({got[2]} {got[3]})", large)
    if built := _WHEEL.match(line):
        return Doing(f"building {built[1]}")
    text = line.strip()
    if text.startswith("Collecting "):
        return Doing(f"resolving {text.split()[1]}")
    if text.startswith("Installing build dependencies"):
        return Doing("fetching the build's own tools")
    if text.startswith("Installing collected packages"):
        count = text.partition(":")[2].count(",") + 1
        return Doing(f"installing {count} package{'' if count == 1 else 's'}", large=True)
    return None


def bar(step: Step, seconds: float, width: int = 24) -> str:
    """``llama.cpp [####....] 12/48 files, 31 s``."""
    filled = width * min(step.done, step.total) // max(step.total, 1)
    unit = "%" if step.total == 100 else f"/{step.total} files"
    return f"llama.cpp [{'#' * filled}{'.' * (width - filled)}] {step.done}{unit}, {seconds:.0f} s"
