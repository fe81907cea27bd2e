"""What each bench's picture shows. ``pyplot`` is handed in: matplotlib may not be installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vram_conductor.client import bench_gantt
from vram_conductor.client.bench_colours import BAD, GOOD, LIMIT, PALE, PLAIN, ROOM
from vram_conductor.client.bench_report import BenchReport, Figure

MIB = 1 << 20

_IN_WORDS = {
    "a": "to the\nsmaller model",
    "b": "to the\nlarger model",
    "wake_weights": "weights waking",
    "wake": "a model waking, with its KV",
    "third_rate": "third agent's tokens/s\nwhile others switch",
    "prefetch_rate": "third agent's tokens/s\nbeside prefetches",
    "park": "KV parking",
    "resume": "KV resuming",
}
"""Of figures and agents of ``switch``; in words short enough for an axis."""


def parallel(pyplot: Any, report: BenchReport) -> None:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=[1, 1.6])
    names, alone, both = (report.data[key] for key in ("models", "alone", "both"))
    places = range(len(names))
    left.bar([at - 0.2 for at in places], alone, 0.4, label="alone", color=PALE)
    left.bar([at + 0.2 for at in places], both, 0.4, label="all at once", color=PLAIN)
    left.set_xticks(list(places), names)
    left.set_ylabel("tokens/s")
    left.legend()
    for index, streams in enumerate(report.data["timelines"]):
        style = "-" if index else "--"
        for at, stream in enumerate(streams):
            what = f"{stream['model']}, {'at once' if index else 'in turn'}"
            right.plot(stream["ms"], stream["tokens"], style, color=f"C{at}", label=what)
    right.set_xlabel("ms since the first job was sent")
    right.set_ylabel("tokens")
    right.legend(fontsize=7)
    window, whole = report.figure("window_ratio"), report.figure("ratio")
    assert window is not None
    assert whole is not None
    figure.suptitle(
        f"several models in one process: {window.value:.2f} x their mean rate while all stream, "
        f"{whole.value:.2f} x until the last has ended"
    )
    figure.tight_layout(rect=ROOM)


def switch(pyplot: Any, report: BenchReport) -> None:
    """Times to first token, shares of the reference rates, what a third agent notices."""
    page, (times, shares, gaps) = pyplot.subplots(1, 3, figsize=(15, 5), width_ratios=[1.2, 1.3, 1])
    _first_tokens(times, report)
    _shares(shares, report)
    beside = report.data.get("beside")
    if beside and beside["piece_gaps_ms"]:
        gaps.hist(beside["piece_gaps_ms"], bins=60, color=PLAIN)
        gaps.set_yscale("log")
        gaps.set_xlabel("ms between messages of a third agent")
        gaps.set_title("while two others switch without pause", fontsize=9)
        gaps.set_ylabel("messages")
    page.suptitle("switching agents: " + report.data.get("mechanism", "no mechanism"))
    page.tight_layout(rect=ROOM)


def _first_tokens(axes: Any, report: BenchReport) -> None:
    rows = {_IN_WORDS[agent]: pair for agent, pair in report.data.get("timeshare", {}).items()}
    for key, name in (("prefetched", "KV\nprefetched"), ("same_model", "same\nmodel")):
        if key in report.data:
            rows[name] = report.data[key]
    keys = {"KV\nprefetched": "prefetched", "same\nmodel": "same_model"}
    keys |= {_IN_WORDS[agent]: f"switch_{agent}" for agent in ("a", "b")}
    for at, (name, pair) in enumerate(rows.items()):
        for side, color, shift in (("switched_ms", PLAIN, -0.12), ("resident_ms", PALE, 0.12)):
            values = pair[side]
            axes.plot([at + shift] * len(values), values, ".", color=color, alpha=0.6)
        figure = report.figure(keys[name])
        if figure is not None and figure.wanted is not None:
            middle = sorted(pair["resident_ms"])[len(pair["resident_ms"]) // 2]
            axes.hlines(middle + figure.wanted, at - 0.35, at + 0.35, color=LIMIT, linestyle="--")
    axes.set_xticks(range(len(rows)), list(rows))
    axes.set_ylim(bottom=0)
    axes.set_ylabel("ms to first token")
    axes.set_title("dark: switched, pale: resident, line: limit", fontsize=9)


def _shares(axes: Any, report: BenchReport) -> None:
    """Everything in per cent, with its limit."""
    rows = [item for item in report.figures if item.unit == "%" and item.value is not None]
    bars(axes, rows, "% of the copy rate, or of the rate alone (line: limit)")


def bars(axes: Any, rows: Sequence[Figure], label: str) -> None:
    """Horizontal bars, the first on top; green or red where something is wanted."""
    colors = {True: GOOD, False: BAD, None: PLAIN}
    for at, row in enumerate(rows):
        axes.barh(at, row.value, color=colors[row.reached], height=0.6)
        if row.wanted is not None:
            axes.vlines(row.wanted, at - 0.4, at + 0.4, color=LIMIT, linestyle="--")
        axes.text(0, at, f" {row.value:.3g}", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(rows)), [_IN_WORDS.get(row.key, row.key) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)


def leak(pyplot: Any, report: BenchReport) -> None:
    """Memory in use over time, against the cap: the switches, and the random steps."""
    names = [name for name in ("watch", "walk") if report.data.get(name)]
    page, found = pyplot.subplots(1, max(1, len(names)), figsize=(14, 5), squeeze=False)
    caps = {"watch": "cap_bytes", "walk": "walk_cap_bytes"}
    for axes, name in zip(_flat(found), names, strict=True):
        _in_use(axes, report, report.data[name], report.data.get(caps[name]))
    page.suptitle("memory in use over many switches, and over random steps")
    page.tight_layout(rect=ROOM)


def _flat(found: Any) -> list[Any]:
    """The plots of a page with one row."""
    return list(found[0])


def _in_use(axes: Any, report: BenchReport, watch: Any, cap_bytes: int | None) -> None:
    axes.plot(watch["s"], [used / MIB for used in watch["bytes"]], linewidth=0.8, label="in use")
    if report.device.startswith("cuda"):
        if watch["lines"]:
            times, sizes = zip(*watch["lines"], strict=True)
            label = "the worker's lines and what others use"
            axes.plot(times, [size / MIB for size in sizes], ".", color=GOOD, label=label)
        if cap_bytes is not None:
            limit = (cap_bytes + report.data["foreign_bytes"]) / MIB
            axes.axhline(limit, color=BAD, linestyle="--", label="cap (and what others use)")
    for mark in watch["marks"]:
        axes.axvline(mark["s"], color=LIMIT, linewidth=0.6, linestyle=":")
        # Upright, before their line: some follow one another closely.
        axes.text(
            mark["s"],
            0.02,
            mark["what"],
            transform=axes.get_xaxis_transform(),
            rotation=90,
            ha="right",
            va="bottom",
            fontsize=7,
        )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s")
    axes.set_ylabel("MiB in use")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def estimate(pyplot: Any, report: BenchReport) -> None:
    """How far each estimate is over, in MiB and per cent, with the limits."""
    points = report.data["points"]
    size = (13, 1.8 + 0.3 * len(points))
    page, (mib, share) = pyplot.subplots(1, 2, figsize=size, sharey=True)
    for at, point in enumerate(points):
        over, used = point["over_bytes"], max(1, point["used_bytes"])
        color = GOOD if 0 <= over <= point["allowed_bytes"] else BAD
        mib.barh(at, over / MIB, color=color, height=0.6)
        mib.vlines(point["allowed_bytes"] / MIB, at - 0.4, at + 0.4, color=LIMIT, linestyle="--")
        share.barh(at, 100 * over / used, color=color, height=0.6)
        for axes, value in ((mib, over / MIB), (share, 100 * over / used)):
            axes.text(max(0, value), at, f" {value:.3g}", va="center", fontsize=7)
        limit = 100 * point["allowed_bytes"] / used
        share.vlines(limit, at - 0.4, at + 0.4, color=LIMIT, linestyle="--")
    mib.set_yticks(range(len(points)), [point["name"] for point in points], fontsize=8)
    mib.invert_yaxis()
    for axes, label in ((mib, "MiB"), (share, "%")):
        axes.axvline(0, color=LIMIT, linewidth=0.8)
        axes.set_xlabel(f"promised over used, {label} (line: limit)")
    page.suptitle("estimates before the load, over what the device uses after the warm-up")
    page.tight_layout(rect=ROOM)


PICTURES: dict[str, Callable[[Any, BenchReport], None]] = {
    "estimate": estimate,
    "leak": leak,
    "parallel": parallel,
    "pipeline": bench_gantt.pipeline,
    "switch": switch,
}
