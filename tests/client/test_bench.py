"""The benches on a cpu device with tiny models: structure and sanity, not speed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from canvas import Canvas

from vram_conductor.client import bench_plot
from vram_conductor.client.bench_pictures import PICTURES
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import Setting, random_models
from vram_conductor.client.cli import main
from vram_conductor.client.cli_bench import BENCHES
from vram_conductor.protocol.errors import FailedPrecondition, Unavailable


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three tiny random models, made by the product's own maker."""
    found = random_models(["tiny-3", "tiny-1", "tiny-2"], tmp_path_factory.mktemp("models"))
    assert [model.name for model in found] == ["tiny-1", "tiny-2", "tiny-3"], "smallest first"
    return [model.path for model in found]


def bench(verb: str, models: list[str], folder: Path, *more: str) -> dict[str, Any]:
    """Run a bench as a user does; what it wrote."""
    file = folder / f"{verb}.json"
    flags = ["--device", "cpu", "--threads", "1", "--rounds", "1", "--json", str(file)]
    code = main(["bench", verb, *flags, *more, "--models", *models])
    value: dict[str, Any] = json.loads(file.read_text())
    assert code == 0, value["failures"]
    assert value["bench"] == verb
    assert value["device"] == "cpu"
    for figure in value["figures"]:
        assert figure["wanted"] is None, "a cpu owes no figure of a GPU"
        assert figure["reached"] is None
    check_picture(value)
    return value


def figures(value: dict[str, Any]) -> dict[str, Any]:
    return {figure["key"]: figure["value"] for figure in value["figures"]}


def check_picture(value: dict[str, Any]) -> None:
    """What was written is enough to draw the picture with."""
    rows = [
        Figure(**{key: item for key, item in row.items() if key != "reached"})
        for row in value["figures"]
    ]
    report = BenchReport(value["bench"], value["device"], figures=rows, data=value["data"])
    canvas = Canvas()
    PICTURES[report.bench](canvas, report)
    assert len(canvas.calls) > 5


# --- whole benches ---


@pytest.mark.real
def test_parallel_counts_the_same_tokens_both_ways(models: list[str], tmp_path: Path) -> None:
    value = bench("parallel", models, tmp_path)
    assert figures(value)["ratio"] > 0
    # Tiny models may be through before all of them stream: then it is 0, but it is shown.
    assert figures(value)["window_ratio"] is not None
    assert [sorted(item) for item in value["data"]["rounds"]] == [
        ["alone", "at_once", "beside", "in_turn", "ratio", "window_ratio"]
    ]
    for streams in value["data"]["timelines"]:
        assert [stream["tokens"][-1] for stream in streams] == [24, 24, 24]


@pytest.mark.real
@pytest.mark.slow
def test_switch_really_switches(models: list[str], tmp_path: Path) -> None:
    value = bench("switch", models, tmp_path)
    found, data = figures(value), value["data"]
    for agent in "ab":
        pair = data["timeshare"][agent]
        assert min(pair["switched_ms"] + pair["resident_ms"]) > 0
        assert all(pair["swap_bytes"]), "the device was given to somebody else each time"
        assert not pair["reprefilled"], "KV was put back, not computed again"
        other = "b" if agent == "a" else "a"
        assert any(f"/{other}/" in name for name in pair["evicted"][-1])
    assert all(data["same_model"]["swap_bytes"])
    assert found["park"] > 0
    assert found["resume"] > 0
    assert found["third_rate"] > 0
    assert data["beside"]["switches"] > 0
    parts = data["timeshare"]["a"]["parts"]["resident"]
    assert 0 < parts["prefill_ms"][0] < parts["ttft_ms"][0]
    # On threads a worker brings early what is parked, and the bench sees that it has.
    assert found["prefetched"] is not None
    assert not any(data["prefetched"]["swap_bytes"])
    beside = data["prefetch_beside"]
    assert beside["prefetches"] > 0
    assert beside["prefetched_bytes"] >= beside["prefetches"] << 18


@pytest.mark.real
def test_leak_ends_where_it_began(models: list[str], tmp_path: Path) -> None:
    value = bench("leak", models, tmp_path)
    found = figures(value)
    assert {"switches", "unregistered", "again", "unregistered_again"} <= found.keys()
    assert found["walk"] == 10
    assert found["walk_problems"] == 0
    watch = value["data"]["watch"]
    assert len(watch["s"]) == len(watch["bytes"]) > 5
    assert watch["s"] == sorted(watch["s"])
    assert min(watch["bytes"]) > 1 << 20, "a Python process has that"
    lives = [value["data"]["levels"][name] for name in ("first", "second")]
    assert all(life["switches"] >= 2 for life in lives)


# --- asking for one ---


def test_every_bench_has_a_picture() -> None:
    assert PICTURES.keys() == BENCHES.keys()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--random", "13T"], "unknown_size"),
        (["--models", "/no/such/file.gguf"], "no_such_model"),
        (["--device", "tpu:0"], "no_such_device"),
        (["--rounds", "-1"], "bad_value"),
        (["--seconds", "nan"], "bad_value"),
        (["--seconds", "inf"], "bad_value"),
        (["--seconds", "1e308"], "bad_value"),
        (["--seconds", "-1"], "bad_value"),
        (["--random", ""], "bad_value"),
        (["--random", ", "], "bad_value"),
        (["--json", "/no/such/folder/x.json"], "bad_output"),
        (["--json", "/"], "bad_output"),
        (["--json", ""], "bad_output"),
        (["--plot", "/no/such/folder/x.png"], "bad_output"),
        (["--plot", "x.exe"], "bad_output"),
        (["--plot", "/"], "bad_output"),
        (["--plot", ""], "bad_output"),
    ],
)
def test_a_wrong_flag_is_said_with_its_reason(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "parallel", *flags]) != 0
    assert f"({reason})" in capsys.readouterr().err


def test_a_model_whose_name_is_not_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worker and broker speak JSON."""
    path = os.fsencode(tmp_path) + b"/\xff.gguf"
    try:
        Path(os.fsdecode(path)).write_bytes(b"GGUF")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    assert main(["bench", "pipeline", "--model", os.fsdecode(path)]) == 8
    assert "is not UTF-8; rename the file (bad_value)" in capsys.readouterr().err


def test_one_model_is_too_few(models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "switch", "--models", models[0]]) == 8
    assert "too_few_models" in capsys.readouterr().err


def test_without_matplotlib_it_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FailedPrecondition) as caught:
        bench_plot.load_pyplot()
    assert "pip install" in caught.value.info.message
    assert main(["bench", "parallel", "--plot", str(tmp_path / "x.png")]) == 1
    assert "matplotlib_missing" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_picture_is_a_png_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    report = BenchReport("leak", "cuda:0", "a GPU")
    report.data = {
        "watch": {
            "s": [0, 1],
            "bytes": [1 << 30, 1 << 29],
            "marks": [{"s": 0.5, "what": "x"}],
            "lines": [[0.5, 1 << 29]],
        },
        "cap_bytes": 1 << 30,
        "foreign_bytes": 0,
    }
    bench_plot.plot(report, tmp_path / "leak.png")
    assert (tmp_path / "leak.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_before_a_failure_is_kept(
    models: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def half(setting: Setting, report: BenchReport, say: Any) -> None:
        report.add(Figure("one", "the first half", 1.0, "ms"))
        raise Unavailable("no_worker", "the worker is gone")

    monkeypatch.setitem(BENCHES, "parallel", (half, ""))
    file = tmp_path / "half.json"
    assert main(["bench", "parallel", "--json", str(file), "--models", *models]) == 6
    value = json.loads(file.read_text())
    assert [figure["key"] for figure in value["figures"]] == ["one"]
    assert "the worker is gone" in value["failures"][0]
    assert "the first half" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.slow
def test_every_point_of_the_grid_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    assert main(["bench", "estimate", "--json", str(file)]) == 0
    value = json.loads(file.read_text())
    points = value["data"]["points"]
    assert len(points) >= 10
    assert len({point["arch"] for point in points}) >= 4
    for point in points:
        # Buffers of a cpu are not the point here; an estimate of another model would be far off.
        assert abs(point["over_bytes"]) < max(1 << 20, point["used_bytes"] // 20), point
    check_picture(value)
