"""``bench pipeline``: what it gains that layers travel while others are computed.

The worker's side measures (``worker.bench.pipeline``); here it is judged, shown and drawn. With a
model, the layers are its own: ``bench_layers``.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vram_conductor.client import bench_layers
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import Setting, ask_worker
from vram_conductor.client.text import plural, size, table
from vram_conductor.protocol.errors import Internal

WANTED_PERCENT = 97.0
"""Of the bound, on a GPU."""

BUSY = 1.02
"""A share of the bound that says more about other programs."""

N_LAYERS = 8
BYTES_CUDA, BYTES_CPU = 64 << 20, 16 << 20
REPEATS, GRID_REPEATS = 5, 3
ROWS_MAX = 16
"""Layers beyond so many are only in the JSON."""


class Row(msgspec.Struct, frozen=True):
    """One setting, as the worker's side measured it. Times in ms per pass over all layers.

    Attributes:
        aim: computation over transfer, where the iterations were chosen for it.
        transfer_ms, compute_ms: each alone (T and C).
        overlapped_ms: passes back to back.
        single_ms, single_optimum_ms: one pass alone from empty slots, and the shortest possible.
        share: of the bound, 0 to 1.
    """

    n_layers: int
    bytes_per_layer: int
    slots: int
    iterations: int
    aim: float | None
    transfer_ms: float
    compute_ms: float
    serial_ms: float
    overlapped_ms: float
    single_ms: float
    single_optimum_ms: float
    bound: float
    share: float
    unit_transfer_ms: list[float]
    unit_compute_ms: list[float]

    @property
    def speedup(self) -> float:
        return self.serial_ms / self.overlapped_ms

    @property
    def layers(self) -> str:
        return f"{self.n_layers} x {size(self.bytes_per_layer)}"

    @property
    def transfer_gb_s(self) -> float:
        return self.n_layers * self.bytes_per_layer / self.transfer_ms / 1e6


def measure(setting: Setting, report: BenchReport, say: Callable[[str], None]) -> None:
    """One setting or a grid of them, or a model's own layers.

    Raises:
        ConductorError: what the worker's side failed with.
        Internal: ``bench_failed``: its answer makes no sense.
    """
    if setting.models:
        bench_layers.measure(setting, report, say)
        return
    say("measuring passes over made-up layers")
    timeout_s = setting.left_s + 60
    found = ask_worker("pipeline", *_arguments(setting), timeout_s=timeout_s, news=say)
    try:
        rows = msgspec.convert(found["rows"], list[Row])
        report.device_name, report.data["where"] = found["device_name"], found["where"]
        report.data["seconds"] = found["seconds"]
        report.notes += [found["where"], *found["notes"]]
        report.failures += found["failures"]
        best = max(rows, key=lambda row: row.speedup)
    except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
        raise Internal("bench_failed", f"bench pipeline says nonsense: {error}") from None
    if any(row.share > BUSY for row in rows):
        report.notes.append(
            "more than the bound was reached: something else was busy while the streams were "
            "measured alone; end it and measure again"
        )
    report.notes.append(f"medians of {plural(setting.extra['repeats'], 'round')}")
    report.data["rows"] = found["rows"]
    report.headline = headline(best.serial_ms, best.overlapped_ms)
    if setting.extra["grid"]:
        _grid(report, rows, best, on_cuda=setting.on_cuda)
    else:
        _one(report, best, on_cuda=setting.on_cuda)


def headline(serial_ms: float, overlapped_ms: float) -> str:
    """The result in one line."""
    savings = 100 * (1 - overlapped_ms / serial_ms)
    return (
        f"HEADLINE: serial={serial_ms:.2f} ms, overlapped={overlapped_ms:.2f} ms, "
        f"savings={savings:.1f} %, speedup={serial_ms / overlapped_ms:.3f}x"
    )


def _arguments(setting: Setting) -> list[str]:
    extra = setting.extra
    arguments = ["--device", setting.device, "--slots", str(extra["slots"])]
    arguments += ["--repeats", str(extra["repeats"])]
    if extra["grid"]:
        return [*arguments, "--grid", "--seconds", str(int(0.9 * setting.left_s))]
    for flag in ("n_layers", "bytes_per_layer", "compute_iters"):
        arguments += [f"--{flag.replace('_', '-')}", str(extra[flag])]
    return arguments


def _one(report: BenchReport, row: Row, *, on_cuda: bool) -> None:
    share = Figure(
        "share",
        "of the bound reached, passes back to back",
        100 * row.share,
        "%",
        WANTED_PERCENT if on_cuda else None,
        ">=",
    )
    figures = [
        share,
        Figure("speedup", "serial over overlapped", row.speedup, "x"),
        Figure("bound", "most that overlap can gain, (T+C)/max(T,C)", row.bound, "x"),
        Figure(
            "transfer", "transfers alone (T)", row.transfer_ms, "ms", note=_rate(row.transfer_gb_s)
        ),
        Figure("compute", "computation alone (C)", row.compute_ms, "ms"),
        Figure("serial", "a pass, serial", row.serial_ms, "ms"),
        Figure("overlapped", "a pass, overlapped, back to back", row.overlapped_ms, "ms"),
        Figure("single", "one pass alone, from empty slots", row.single_ms, "ms"),
        Figure("single_optimum", "shortest that it could be", row.single_optimum_ms, "ms"),
        Figure(
            "single_share",
            "of that reached",
            100 * row.single_optimum_ms / row.single_ms,
            "%",
        ),
    ]
    for figure in figures:
        report.add(figure)
    report.more = _per_layer(row)
    report.notes.append(
        f"{row.layers} through {row.slots} slots, {plural(row.iterations, 'iteration')} per layer"
        + _chosen(row)
    )


def _rate(gb_s: float) -> str:
    return f"{gb_s:.1f} GB/s"


def _chosen(row: Row) -> str:
    if row.aim is None:
        return ""
    ratio = row.compute_ms / row.transfer_ms
    if ratio > 1.5 * row.aim:
        return f": the least there is, and {ratio:.1f} times what transfer takes"
    return ", so that computation takes as long as transfer"


def _per_layer(row: Row) -> str:
    """A table; the middle of many layers is left out."""
    times = list(zip(row.unit_transfer_ms, row.unit_compute_ms, strict=True))
    shown = range(len(times))
    half = ROWS_MAX // 2
    cells = [
        [str(layer), f"{times[layer][0]:.3f}", f"{times[layer][1]:.3f}"]
        for layer in shown
        if len(times) <= ROWS_MAX or layer < half or layer >= len(times) - half
    ]
    if len(times) > ROWS_MAX:
        cells.insert(half, ["…", "…", "…"])
    return table(["layer", "transfer ms", "compute ms"], cells, right=(0, 1, 2))


def _grid(report: BenchReport, rows: list[Row], best: Row, *, on_cuda: bool) -> None:
    wanted = WANTED_PERCENT if on_cuda else None
    worst = min(row.share for row in rows)
    report.add(
        Figure(
            "worst", "least share of the bound (each: see below)", 100 * worst, "%", wanted, ">="
        )
    )
    for row in rows:
        ratio = row.compute_ms / row.transfer_ms
        what = f"{row.layers}, C/T {ratio:.2f}"
        note = f"{row.speedup:.2f}x: {row.serial_ms:.1f} → {row.overlapped_ms:.1f} ms"
        report.add(Figure("share", what, 100 * row.share, "%", wanted, ">=", note))
    iterations = plural(best.iterations, "iteration")
    report.notes.append(f"the headline is of {best.layers}, {iterations} per layer")
