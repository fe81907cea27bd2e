"""How the overlap of ``conductor bench pipeline`` is judged and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from canvas import Canvas

from vram_conductor.client import bench_gantt, bench_pipeline, bench_plot
from vram_conductor.client.bench_pipeline import ROWS_MAX, measure
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import Setting
from vram_conductor.protocol.errors import Internal

MIB = 1 << 20


def spans(*ends: tuple[str, int, float, float]) -> list[dict[str, Any]]:
    return [
        {"stream": stream, "unit": unit, "start_ms": start, "end_ms": end, "at_pass": 0}
        for stream, unit, start, end in ends
    ]


TIMELINES = {
    "serial": spans(
        ("transfer", 0, 10, 11), ("compute", 0, 11, 12), ("transfer", 1, 12, 13),
        ("compute", 1, 13, 14),
    ),
    "overlapped": spans(
        ("transfer", 0, 50, 51), ("transfer", 1, 51, 52), ("compute", 0, 51, 52),
        ("compute", 1, 52, 53),
    ),
}  # fmt: skip


def row(share: float = 0.98, n_layers: int = 2, **changes: Any) -> dict[str, Any]:
    return {
        "n_layers": n_layers,
        "bytes_per_layer": 64 * MIB,
        "slots": 2,
        "iterations": 100,
        "aim": None,
        "transfer_ms": 2.0,
        "compute_ms": 2.0,
        "serial_ms": 4.0,
        "overlapped_ms": 2.0 / share,
        "single_ms": 3.0,
        "single_optimum_ms": 3.0,
        "bound": 2.0,
        "share": share,
        "unit_transfer_ms": [2.0 / n_layers] * n_layers,
        "unit_compute_ms": [2.0 / n_layers] * n_layers,
        "timelines": TIMELINES,
        **changes,
    }


def judged(
    monkeypatch: pytest.MonkeyPatch,
    rows: Any,
    device: str = "cuda:0",
    *,
    grid: bool = False,
    notes: Any = (),
) -> BenchReport:
    asked: list[tuple[str, ...]] = []

    def answer(*arguments: str, timeout_s: float, news: Callable[[str], None]) -> Any:
        asked.append(arguments)
        return {
            "rows": rows,
            "seconds": {"passes": 1.5},
            "device_name": "a GPU",
            "where": "from here to there",
            "notes": list(notes),
            "failures": [],
        }

    monkeypatch.setattr(bench_pipeline, "ask_worker", answer)
    report = BenchReport("pipeline", device)
    extra = {"slots": 3, "repeats": 4, "grid": grid, "n_layers": 2, "bytes_per_layer": 64 * MIB}
    extra["compute_iters"] = 100
    measure(Setting(device, (), until_s=0, extra=extra), report, lambda text: None)
    (arguments,) = asked
    assert arguments[:7] == ("pipeline", "--device", device, "--slots", "3", "--repeats", "4")
    assert ("--grid" in arguments) == grid
    assert ("--bytes-per-layer" in arguments) == (not grid)
    return report


@pytest.mark.parametrize(("share", "reached"), [(0.98, True), (0.97, True), (0.9699, False)])
def test_a_gpu_owes_97_percent(
    share: float, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = judged(monkeypatch, [row(share)])
    figure = report.figure("share")
    assert figure is not None
    assert figure.reached is reached
    figure = judged(monkeypatch, [row(share)], "cpu").figure("share")
    assert figure is not None
    assert figure.reached is None


def test_the_worst_setting_of_a_grid_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged(
        monkeypatch, [row(0.99), row(0.95), row(0.98, serial_ms=8.0)], grid=True, notes=["no time"]
    )
    worst = report.figure("worst")
    assert worst is not None
    assert worst.value == pytest.approx(95)
    assert worst.reached is False
    shares = [figure.reached for figure in report.figures if figure.key == "share"]
    assert shares == [True, False, True]
    assert report.headline.startswith("HEADLINE: serial=8.00"), "the best setting's"
    assert "no time" in report.notes


def test_more_than_the_bound_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("busy" in note for note in judged(monkeypatch, [row(1.01)]).notes)
    assert any("busy" in note for note in judged(monkeypatch, [row(1.03)]).notes)


def test_a_computation_that_cannot_be_short_enough_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    near = judged(monkeypatch, [row(aim=1.0)]).notes[-1]
    assert near.endswith("as long as transfer")
    far = judged(monkeypatch, [row(aim=1.0, compute_ms=8.0)]).notes[-1]
    assert "4.0 times what transfer takes" in far


def test_of_many_layers_the_middle_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    few = judged(monkeypatch, [row(n_layers=ROWS_MAX)]).more.splitlines()
    many = judged(monkeypatch, [row(n_layers=64)]).more.splitlines()
    assert [line.split()[0] for line in few[1:]] == [str(layer) for layer in range(ROWS_MAX)]
    ends = [*range(8), "…", *range(56, 64)]
    assert [line.split()[0] for line in many[1:]] == [str(layer) for layer in ends]


@pytest.mark.parametrize("rows", [None, [], [{"n_layers": 3}], "x"])
def test_nonsense_is_an_error(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Internal, match="nonsense"):
        judged(monkeypatch, rows)


class Chart:
    """Keeps the bars that are drawn."""

    def __init__(self) -> None:
        self.bars: list[tuple[float, float, float]] = []

    def broken_barh(
        self, ranges: list[tuple[float, float]], lane: tuple[float, float], **how: Any
    ) -> None:
        ((start, width),) = ranges
        self.bars.append((lane[0], start, width))

    def __getattr__(self, name: str) -> Any:
        def nothing(*arguments: Any, **options: Any) -> None:
            pass

        return nothing


def test_both_schedules_are_drawn_from_the_same_zero_serial_above() -> None:
    chart = Chart()
    bench_gantt.gantt(chart, TIMELINES, 3.0)
    serial, overlapped = chart.bars[:4], chart.bars[4:]
    assert min(lane for lane, _, _ in serial) > max(lane for lane, _, _ in overlapped)
    assert [bar[1:] for bar in serial] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [bar[1:] for bar in overlapped] == [(0, 1), (1, 1), (1, 1), (2, 1)]
    assert len({lane for lane, _, _ in chart.bars}) == 4


@pytest.mark.parametrize("grid", [False, True])
def test_there_is_a_picture(grid: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [row(), row(compute_ms=1.0), row(n_layers=4)] if grid else [row()]
    report = judged(monkeypatch, rows, grid=grid)
    canvas = Canvas()
    bench_gantt.pipeline(canvas, report)
    assert "broken_barh" in canvas.calls
    assert ("set_xscale" in canvas.calls) == grid
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    bench_plot.plot(report, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
