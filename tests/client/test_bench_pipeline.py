"""``conductor bench pipeline``: a small run on threads as a user does it, and how it is judged."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from canvas import Canvas
from terminal import Terminal

from vram_conductor.client import bench_gantt, bench_pipeline, bench_plot
from vram_conductor.client.bench_pipeline import ROWS_MAX, headline, measure
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import Setting, ask_worker
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import Internal

MIB = 1 << 20
SMALL = ["--n-layers", "3", "--bytes-per-layer", "64KiB", "--compute-iters", "3", "--repeats", "2"]
HEADLINE = re.compile(
    r"HEADLINE: serial=(\d+\.\d\d) ms, overlapped=(\d+\.\d\d) ms, "
    r"savings=(-?\d+\.\d) %, speedup=(\d+\.\d{3})x"
)


def test_the_headline_is_that_of_the_design() -> None:
    """The figures of the first demonstration of this schedule."""
    line = headline(151.41, 117.85)
    expected = "serial=151.41 ms, overlapped=117.85 ms, savings=22.2 %, speedup=1.285x"
    assert line == f"HEADLINE: {expected}"
    assert HEADLINE.fullmatch(line)
    assert HEADLINE.fullmatch(headline(1.0, 2.0)), "a loss is said as one"


# --- as a user does it ---


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pipeline.json"
    assert main(["bench", "pipeline", *SMALL, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    first = HEADLINE.fullmatch(text.splitlines()[0])
    assert first is not None
    assert "no GPU" in text
    assert "3 x 64.0 KiB through 2 slots, 3 iterations per layer" in " ".join(text.split())
    assert re.search(r"^layer +transfer ms +compute ms$", text, re.MULTILINE)
    value = json.loads(file.read_text())
    assert value["headline"] == first[0]
    found = {figure["key"]: figure["value"] for figure in value["figures"]}
    assert float(first[1]) == pytest.approx(found["serial"], abs=0.005)
    assert float(first[2]) == pytest.approx(found["overlapped"], abs=0.005)
    assert float(first[4]) == pytest.approx(found["speedup"], abs=0.0005)
    total, longer = found["transfer"] + found["compute"], max(found["transfer"], found["compute"])
    assert found["bound"] == pytest.approx(total / longer)
    assert found["share"] == pytest.approx(100 * longer / found["overlapped"])
    assert all(figure["wanted"] is None for figure in value["figures"]), "a CPU owes nothing"
    assert value["setting"]["bytes_per_layer"] == 64 << 10
    (row,) = value["data"]["rows"]
    for layer, ms in enumerate(row["unit_compute_ms"]):
        assert re.search(rf"^ *{layer} +\S+ +{ms:.3f}$", text, re.MULTILINE)


def test_the_default_finds_its_iterations(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--n-layers", "2", "--bytes-per-layer", "256KiB", "--repeats", "1", "--json"]
    assert main(["bench", "pipeline", *flags]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["data"]["rows"][0]["aim"] == 1.0
    assert value["data"]["rows"][0]["iterations"] >= 1


def test_a_grid_that_has_little_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipeline", "--grid", "--seconds", "1", "--json"]) == 0
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert len(value["data"]["rows"]) >= 1
    assert any("no time was left" in note for note in value["notes"])
    assert "medians of 3 rounds" in value["notes"]
    assert value["data"]["seconds"].keys() == {"layers", "iterations", "passes"}
    assert re.search(r"^1 of 6: 16 layers of 4 MiB at C/T 1$", said.err, re.MULTILINE)


def test_what_the_worker_says_last_is_told_if_it_gives_no_answer() -> None:
    news: list[str] = []
    with pytest.raises(Internal, match="invalid choice: 'no-such-bench'"):
        ask_worker("no-such-bench", news=news.append)
    assert not news


@pytest.mark.parametrize("columns", [80, 120])
def test_it_fits_into_a_terminal(columns: int) -> None:
    command = [sys.executable, "-m", "vram_conductor.client.cli", "bench", "pipeline", *SMALL]
    with Terminal(command, columns=columns, rows=60) as terminal:
        assert terminal.wait() == 0
        lines = [line for line in terminal.text.splitlines() if "bench pipeline" not in line]
    assert max(map(len, lines)) <= columns
    assert any(HEADLINE.fullmatch(line) for line in lines)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--n-layers", "0"], "bad_layers"),
        (["--slots", "5"], "bad_slots"),
        (["--slots", "1"], "bad_slots"),
        (["--bytes-per-layer", "66"], "bad_layer_bytes"),
        (["--bytes-per-layer", "0"], "bad_layer_bytes"),
        (["--bytes-per-layer", "many"], "bad_size"),
        (["--repeats", "0"], "bad_repeats"),
        (["--compute-iters", "-1"], "bad_iterations"),
        (["--bytes-per-layer", "64TiB"], "host_memory_short"),
        (["--device", "tpu"], "no_such_device"),
        (["--batch", "4"], "not_together"),
        (["--resident", "0"], "not_together"),
        (["--model", "x.gguf", "--slots", "2"], "not_together"),
        (["--random", "tiny-1", "--grid"], "not_together"),
        (["--grid", "--n-layers", "8"], "not_together"),
        (["--random", "tiny-1,tiny-2"], "bad_value"),
        (["--random", "13T"], "unknown_size"),
        (["--model", "/no/such/file.gguf"], "no_such_model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "pipeline", *flags]) != 0
    said = capsys.readouterr()
    assert f"({reason})" in said.err
    assert not said.out


# --- how it is judged ---


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


# --- the picture ---


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
        return lambda *arguments, **options: None


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
