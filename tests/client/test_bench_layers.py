"""The bench of a model whose layers travel: who is asked, in which order, and the whole of it."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layers_answers import MIB, layers

from vram_conductor.client import bench_layers
from vram_conductor.client.bench_layers import batches_beside, measure, powers_of_two
from vram_conductor.client.bench_layers_picture import layers as draw
from vram_conductor.client.bench_report import BenchReport
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, Unimplemented


@given(st.integers(1, 5000))
def test_batches_double_up_to_the_largest(most: int) -> None:
    found = powers_of_two(most)
    assert found[0] == 1
    assert found[-1] == most
    assert all(b <= 2 * a for a, b in pairwise(found))


def test_a_batch_that_makes_no_sense_is_left_to_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, batches in ((0, "0"), (-3, "-3,1,2"), (None, "1,2,4,8,16,32,64,128,256,512")):
        worker = Worker()
        run(worker, tmp_path, monkeypatch, batch=most)
        assert option(worker.asked[0], "--batches") == batches


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12, unique=True))
def test_llama_cpp_is_measured_at_few_batches(measured: list[int]) -> None:
    for way, most in (("cpu", 64), ("partial", 256)):
        batches = batches_beside(measured, way)
        assert set(batches) <= set(measured)
        assert len(set(batches)) == len(batches) <= 5
        possible = [batch for batch in measured if batch <= most]
        assert max(batches) == max(possible, default=min(measured))
        assert {1, 8, 64}.intersection(measured) <= set(batches)
    assert batches_beside(powers_of_two(512), "all") == [1, 64, 8, 256]


def setting(folder: Path, seconds: float = 100, **extra: Any) -> Setting:
    model = BenchModel("m", str(folder / "m.gguf"), 1)
    return Setting("cuda:0", (model,), until_s=time.monotonic() + seconds, extra=extra)


class Worker:
    """Answers as the worker's side would; ``broken``: verbs that fail."""

    def __init__(self, broken: dict[str, ConductorError] | None = None) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.broken = broken or {}

    def __call__(
        self, *arguments: str, timeout_s: float = 0, env: dict[str, str] | None = None
    ) -> Any:
        self.asked.append(arguments)
        verb = arguments[0]
        if verb in self.broken:
            raise self.broken[verb]
        if verb == "layers":
            return {"model": {}} if "--describe" in arguments else layers({1: 11.0, 512: 900.0})
        if verb == "layers-text":
            return {"phases": {"load": 1.0}}
        row = {"batch": 1, "tokens_s": 5.0, "step_ms": [1.0], "gpu_layers": 2, "used_bytes": 3}
        return {"rows": [row], "prefill_ms": [], "phases": {"loads": 3.0}, "notes": []}


def run(worker: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> BenchReport:
    monkeypatch.setattr(bench_layers, "ask_worker", worker)
    report = BenchReport("pipeline", "cuda:0")
    measure(setting(folder, **extra), report, lambda text: None)
    return report


def option(asked: tuple[str, ...], flag: str) -> str:
    """``--flag value`` or ``--flag=value``."""
    joined = [argument for argument in asked if argument.startswith(f"{flag}=")]
    return joined[0].partition("=")[2] if joined else asked[asked.index(flag) + 1]


def test_each_has_the_device_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    report = run(worker, tmp_path, monkeypatch, batch=512, window_layers=3, resident_layers=1)
    assert [asked[0] for asked in worker.asked] == [
        "layers",
        "layers-text",
        "layers",
        "layers-beside",
        "layers-beside",
        "layers-beside",
    ]
    ours, partial, cpu, whole = worker.asked[2:]
    assert option(ours, "--batches") == "1,2,4,8,16,32,64,128,256,512"
    assert (option(ours, "--window-layers"), option(ours, "--resident")) == ("3", "1")
    assert option(ours, "--reference") == option(worker.asked[1], "--folder")
    # 512 sequences are more than llama.cpp has.
    assert option(partial, "--batches") == f"1:{300 * MIB}"
    assert "--partial" in partial
    assert [option(asked, "--device") for asked in (partial, cpu, whole)] == [
        "cuda:0",
        "cpu",
        "cuda:0",
    ]
    assert not Path(option(ours, "--reference")).exists(), "logits are not left behind"
    phases = report.data["phases"]
    assert list(phases) == ["describe", "text", "pipeline", "partial", "cpu", "all"]
    assert phases["text"]["parts"] == {"load": 1.0}
    assert all(phase["seconds"] >= 0 for phase in phases.values())
    assert report.data["batches"][0]["batch"] == 1
    assert report.failures == []


def test_a_bad_file_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker({"layers": Unimplemented("unsupported_tensor", "blk.0 is Q2_K")})
    with pytest.raises(Unimplemented):
        run(worker, tmp_path, monkeypatch)
    assert len(worker.asked) == 1


def test_without_llama_cpp_the_pipeline_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = FailedPrecondition("no_library", "llama.cpp cannot be loaded")
    worker = Worker({"layers-text": missing, "layers-beside": missing})
    report = run(worker, tmp_path, monkeypatch)
    assert "--reference" not in worker.asked[2]
    assert report.figure("decode_1") is not None
    assert len(report.failures) == 4
    assert all("cannot be loaded" in failure for failure in report.failures)


def test_without_time_the_pipeline_is_measured_unchecked_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    report = run(worker, tmp_path, monkeypatch, seconds=0)
    assert [asked[0] for asked in worker.asked] == ["layers", "layers", *["layers-beside"] * 3]
    assert "--reference" not in worker.asked[1]
    assert "no time was left for the logits beside llama.cpp's" in report.notes
    assert report.figure("decode_1") is not None


class Canvas:
    """Takes whatever is drawn on it, as matplotlib would; keeps the lines."""

    def __init__(self) -> None:
        self.lines: dict[str, tuple[list[float], list[float]]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if name == "plot":
                self.lines[options["label"]] = (arguments[0], arguments[1])
            return (self, self) if name == "subplots" else self

        return call


def test_a_picture_without_a_batch_is_empty() -> None:
    """As when no time was left for any: nothing can be drawn on logarithmic axes."""
    pyplot = pytest.importorskip("matplotlib.figure")
    page = pyplot.Figure()

    class Pages:
        @staticmethod
        def subplots(**options: Any) -> Any:
            return page, page.subplots()

    draw(Pages, BenchReport("pipeline", "cpu", data={"batches": [], "beside": {}}))
    page.canvas.draw()


@pytest.mark.real
def test_a_tiny_model_is_measured_as_a_user_does(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    flags = ["--random", "tiny-1", "--batch", "2", "--threads", "1", "--json", str(file)]
    code = main(["bench", "pipeline", "--device", "cpu", *flags])
    value = json.loads(file.read_text())
    assert code == 0, value["failures"]
    keys = {figure["key"] for figure in value["figures"]}
    assert {"cosine", "top1", "greedy", "bound_share", "prefill", "decode_1", "over_cpu"} <= keys
    assert [row["batch"] for row in value["data"]["batches"]] == [1, 2]
    assert [row["batch"] for row in value["data"]["beside"]["cpu"]["rows"]] == [1, 2]
    assert value["data"]["timelines"].keys() == {"serial", "overlapped"}
    canvas = Canvas()
    draw(canvas, BenchReport("pipeline", "cpu", data=value["data"]))
    assert len(canvas.lines) == 5
    assert all(len(xs) == len(ys) == 2 for xs, ys in canvas.lines.values())
