"""``bench estimate``: what is promised before anything is loaded, beside what the device then uses.

The worker's side loads every point of a grid and reads the device (``worker.bench.estimates``);
here it is judged, shown and drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import Setting, ask_worker, random_folder
from vram_conductor.protocol.errors import Internal

MIB = 1 << 20
OVER_BYTES = 16 * MIB
OVER_SHARE = 0.02
"""An estimate may be over by the larger of the two, and never under."""

POINTS = 10


class Point(msgspec.Struct, frozen=True):
    """One load.

    Attributes:
        promised_bytes: weights, pool and scratch, as estimated before the load.
        used_bytes: by how much the device's use grew, after a warm-up.
    """

    model: str
    arch: str
    n_ctx: int
    kv_type: str
    slots: int
    promised_bytes: int
    used_bytes: int

    @property
    def over_bytes(self) -> int:
        return self.promised_bytes - self.used_bytes

    @property
    def allowed_bytes(self) -> int:
        """How much it may be over."""
        return max(OVER_BYTES, int(self.used_bytes * OVER_SHARE))

    @property
    def name(self) -> str:
        slots = f" x{self.slots}" if self.slots > 1 else ""
        return f"{self.model} {self.arch} {self.n_ctx} {self.kv_type}{slots}"


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """The whole grid.

    Raises:
        ConductorError: what the worker's side failed with.
        Internal: ``bench_failed``: its answer makes no sense.
    """
    say("loading every point of the grid")
    seconds = min(setting.left_s, 600.0)
    arguments = ["--device", setting.device, "--folder", str(random_folder())]
    arguments += ["--seconds", str(int(0.9 * seconds))]
    found = ask_worker("estimates", *arguments, timeout_s=seconds + 30)
    try:
        points = msgspec.convert(found["rows"], list[Point])
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise Internal("bench_failed", f"bench estimates says nonsense: {error}") from None
    report.device_name = str(found.get("device_name", ""))
    report.notes += found.get("notes", [])
    report.failures += found.get("failures", [])
    _rows(report, points, on_cuda=setting.on_cuda)


def _rows(report: BenchReport, points: list[Point], *, on_cuda: bool) -> None:
    def wanted(value: float) -> float | None:
        return value if on_cuda else None

    report.data["points"] = [_plain(point) for point in points]
    report.add(Figure("points", "loads compared", len(points), "", wanted(POINTS), ">="))
    if not points:
        return
    under = max(0, max(-point.over_bytes for point in points)) / MIB
    worst = max(points, key=lambda point: point.over_bytes - point.allowed_bytes)
    beyond = max(0, worst.over_bytes - worst.allowed_bytes) / MIB
    what = "most that an estimate is under what the device uses"
    report.add(Figure("under", what, under, "MiB", wanted(0.0)))
    what = "most that one is over by more than max(2 %, 16 MiB)"
    report.add(
        Figure("beyond", what, beyond, "MiB", wanted(0.0), note=worst.name if beyond else "")
    )
    for point in points:
        over = point.over_bytes / MIB
        note = f"promised {point.promised_bytes / MIB:.1f}, used {point.used_bytes / MIB:.1f} MiB"
        limit = wanted(point.allowed_bytes / MIB)
        report.add(Figure("point", f"{point.name}: over by", over, "MiB", limit, note=note))


def _plain(point: Point) -> dict[str, Any]:
    return msgspec.structs.asdict(point) | {
        "name": point.name,
        "over_bytes": point.over_bytes,
        "allowed_bytes": point.allowed_bytes,
    }
