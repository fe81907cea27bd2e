"""The picture of the layer pipeline: what was on which stream when, serial and overlapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vram_conductor.client import bench_layers_picture
from vram_conductor.client.bench_colours import GOOD, LIMIT, PALE, PLAIN, ROOM
from vram_conductor.client.bench_report import BenchReport

_LANES = {
    ("serial", "transfer"): 3.2,
    ("serial", "compute"): 2.2,
    ("overlapped", "transfer"): 1.0,
    ("overlapped", "compute"): 0.0,
}
"""Where each stream's bars are, from the bottom."""

_SHADES: dict[str, Sequence[str]] = {"transfer": (PLAIN, PALE), "compute": (GOOD, "#9cc9ae")}
"""Of layers next to each other."""

_NUMBERED_MAX = 32
"""With more layers their numbers would not fit."""


def pipeline(pyplot: Any, report: BenchReport) -> None:
    """Both schedules as a Gantt chart; a grid's speedups beside it."""
    if "batches" in report.data:
        bench_layers_picture.layers(pyplot, report)
        return
    rows = report.data["rows"]
    if len(rows) > 1:
        page, (curve, chart) = pyplot.subplots(1, 2, figsize=(17, 5.5), width_ratios=[1, 1.7])
        _speedups(curve, rows)
    else:
        page, chart = pyplot.subplots(figsize=(12, 4.4))
    shown = max(rows, key=lambda row: row["serial_ms"] / row["overlapped_ms"])
    gantt(chart, shown["timelines"], shown["single_optimum_ms"])
    page.suptitle(report.headline)
    page.tight_layout(rect=ROOM)


def gantt(axes: Any, timelines: Mapping[str, Sequence[dict[str, Any]]], optimum_ms: float) -> None:
    """Serial above, overlapped below, from the same zero.

    Args:
        timelines: per schedule its spans, as ``stream``, ``unit``, ``start_ms``, ``end_ms``.
        optimum_ms: the shortest that the overlapped pass could be.
    """
    numbered = False
    for schedule, spans in timelines.items():
        zero_ms = min(span["start_ms"] for span in spans)
        numbered = max(span["unit"] for span in spans) < _NUMBERED_MAX
        for span in spans:
            at, width = span["start_ms"] - zero_ms, span["end_ms"] - span["start_ms"]
            bottom = _LANES[schedule, span["stream"]]
            color = _SHADES[span["stream"]][span["unit"] % 2]
            axes.broken_barh([(at, width)], (bottom, 0.9), facecolors=color)
            if numbered:
                axes.text(
                    at + width / 2,
                    bottom + 0.45,
                    str(span["unit"]),
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="black" if span["unit"] % 2 else "white",
                    clip_on=True,
                )
    axes.vlines(optimum_ms, -0.15, 2.0, color=LIMIT, linestyle="--", label="shortest possible")
    axes.set_yticks(
        [bottom + 0.45 for bottom in _LANES.values()],
        [f"{schedule}\n{stream}" for schedule, stream in _LANES],
    )
    axes.set_xlim(left=0)
    numbers = " (numbers: layers)" if numbered else ""
    axes.set_xlabel(f"ms, one pass over all layers from empty slots{numbers}")
    axes.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _speedups(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """What was gained, over the ratio of computation to transfer, beside what can be."""
    sizes: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = f"{row['n_layers']} x {row['bytes_per_layer'] / (1 << 20):g} MiB"
        ratio = row["compute_ms"] / row["transfer_ms"]
        sizes.setdefault(name, []).append((ratio, row["serial_ms"] / row["overlapped_ms"]))
    ratios = [ratio for points in sizes.values() for ratio, _ in points]
    low, high = min(*ratios, 0.25), max(*ratios, 4.0)
    line = [low * (high / low) ** (step / 200) for step in range(201)]
    axes.plot(line, [(1 + r) / max(1, r) for r in line], color=LIMIT, linestyle="--", label="bound")
    for at, (name, points) in enumerate(sizes.items()):
        axes.plot(
            *zip(*sorted(points), strict=True), "o-", color=f"C{at}", markersize=4, label=name
        )
    axes.set_xscale("log", base=2)
    ticks = [2.0**power for power in range(-4, 8) if low <= 2.0**power <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("computation alone over transfers alone")
    axes.set_ylabel("serial over overlapped")
    axes.legend(fontsize=7)
