"""The bench of a model whose layers travel: what is made of the worker's answers."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client import bench_layers
from vram_conductor.client.bench_layers import batches_beside, measure, powers_of_two
from vram_conductor.client.bench_layers_figures import add_figures
from vram_conductor.client.bench_layers_found import Beside, BesideRow, Layers, LayersReport
from vram_conductor.client.bench_layers_picture import layers as draw
from vram_conductor.client.bench_report import BenchReport, Figure
from vram_conductor.client.bench_setting import BenchModel, Setting
from vram_conductor.client.cli import main
from vram_conductor.protocol.errors import ConductorError, FailedPrecondition, Unimplemented

MIB = 1 << 20
GIB = 1 << 30


def memory(grown: int | None = None) -> dict[str, Any]:
    return {
        "window_bytes": 200 * MIB,
        "resident_bytes": 0,
        "kv_bytes": 64 * MIB,
        "activation_bytes": 36 * MIB,
        "streamed_bytes": 4 * GIB,
        "counted_bytes": 300 * MIB,
        "grown_bytes": grown,
    }


def layers(rates: dict[int, float], grown: int | None = 310 * MIB) -> dict[str, Any]:
    """An answer: batch → tokens/s; a pass could take 80 ms. C is T at a batch of 16."""
    agreement = {
        "cosine": 0.9996,
        "cosine_least": 0.9995,
        "cosine_median": 0.9999,
        "top1_share": 0.99,
        "positions": 256,
        "greedy_equal": 32,
        "greedy_tokens": 32,
    }
    span = {"stream": "compute", "unit": 0, "start_ms": 0.0, "end_ms": 1.0, "at_pass": 0}
    return {
        "setting": {"n_ctx": 256},
        "device_name": "a GPU",
        "base_bytes": 500 * MIB,
        "model": {"pass_bytes": 4 * GIB, "random": False},
        "rates": {"h2d_gb_s": 55.0},
        "agreement": {
            "text": True,
            "same": agreement | {"cosine_least": 0.99},
            "itself": agreement | {"top1_share": 0.93, "greedy_equal": 17},
            "without": agreement | {"cosine": 0.93},
            "without_layer": 15,
            "copy": agreement,
            "copy_itself": agreement | {"cosine_least": 0.98765},
        },
        "prefill": {
            "tokens": 512,
            "serial_ms": [160.0, 150.0, 170.0],
            "single_ms": [110.0],
            "overlapped_ms": [100.0, 90.0, 110.0],
            "transfer_ms": 80.0,
            "compute_ms": 70.0,
            "bound": 1.875,
            "memory": memory(grown),
            "serial_spans": [span],
            "overlapped_spans": [span],
        },
        "decode": [decode(batch, rate, grown) for batch, rate in rates.items()],
        "without_resident": None,
        "phases": {"prefill": 2.0},
        "notes": [],
    }


def decode(batch: int, rate: float, grown: int | None = None) -> dict[str, Any]:
    return {
        "batch": batch,
        "step_ms": [1e3 * batch / rate],
        "logits_ms": [1e3 * batch / rate],
        "serial_ms": [2e3 * batch / rate],
        "transfer_ms": 80.0,
        "compute_ms": 5.0 * batch,
        "bound_ms": 80.0,
        "own_bytes": 300 * MIB,
        "memory": memory(grown),
    }


def report_of(
    ours: dict[int, float], theirs: dict[int, float], grown: int | None = 310 * MIB
) -> LayersReport:
    rows = [BesideRow(batch, rate, [1.0], 3, 0) for batch, rate in theirs.items()]
    found = LayersReport(msgspec.convert(layers(ours, grown), Layers))
    found.beside["partial"] = Beside(rows, [200.0], {}, [])
    return found


def figures_of(
    found: LayersReport, *, on_cuda: bool = True
) -> tuple[BenchReport, dict[str, Figure]]:
    report = BenchReport("pipeline", "cuda:0" if on_cuda else "cpu")
    add_figures(report, found, on_cuda=on_cuda)
    return report, {figure.key: figure for figure in report.figures}


def test_what_is_wanted_stands_beside_what_was_measured() -> None:
    report, found = figures_of(report_of({1: 11.0, 2: 22.0}, {1: 5.0, 2: 30.0}))
    assert found["bound_share"].value == pytest.approx(88)
    assert found["prefill"].value == pytest.approx(1.6)
    assert found["beside"].value == pytest.approx(10)
    assert found["cosine"].value == 0.9996
    assert found["copy_cosine"].value == 0.9995
    assert "llama.cpp with itself 0.98765" in found["copy_cosine"].note
    assert found["top1"].value == 99
    assert "llama.cpp with itself 93.0 %; on a copy in float32 ours 99.0 %" in found["top1"].note
    assert "llama.cpp with itself 17" in found["greedy"].note
    assert found["top1"].wanted == 98
    assert found["cosine"].row()[1:3] == ["0.99960", ">= 0.99900"]
    assert found["without"].row()[1:4] == ["0.93000", "<= 0.99000", "reached"]
    assert "layer 15" in found["without"].what
    assert found["copy_top1"].wanted == 98
    wanted = (
        "bound_share",
        "prefill",
        "beside",
        "cosine",
        "top1",
        "greedy",
        "copy_top1",
        "copy_greedy",
    )
    assert [found[key].reached for key in wanted] == [True] * 8
    assert report.headline.startswith("HEADLINE: prefill of 512 tokens: serial=160.00 ms, ")
    assert "speedup=1.600x" in report.headline
    assert "88 % of what the copy rate allows" in report.headline


def test_what_is_missed_is_said() -> None:
    slow = report_of({1: 8.0}, {1: 9.0}, grown=500 * MIB)
    report, found = figures_of(slow)
    assert found["bound_share"].reached is False
    assert found["beside"].reached is False
    assert "slower at batch 1 (0.89 x)" in report.notes[0]


def test_a_cpu_owes_no_speed_of_a_gpu() -> None:
    _, found = figures_of(report_of({1: 8.0}, {}, grown=None), on_cuda=False)
    assert "beside" not in found
    assert [found[key].wanted for key in ("bound_share", "prefill")] == [None, None]


def test_agreement_is_shown_as_far_as_it_was_measured() -> None:
    value = layers({1: 8.0})
    value["agreement"]["copy"] = None
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert "copy_cosine" not in found
    assert found["cosine"].reached
    value["agreement"] = None
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert "cosine" not in found


def test_first_choices_that_differ_are_missed_however_llama_cpp_agrees_with_itself() -> None:
    value = layers({1: 8.0})
    value["agreement"]["same"] |= {"top1_share": 0.965, "greedy_equal": 17}
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert [found[key].reached for key in ("top1", "greedy")] == [False, False]
    # Of random weights none is the right one; a copy in float32 must be followed all the same.
    value["model"]["random"] = True
    value["agreement"]["copy"] = value["agreement"]["same"]
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    keys = ("top1", "greedy", "copy_top1", "copy_greedy")
    assert [found[key].reached for key in keys] == [None, None, False, False]


def test_a_comparison_that_cannot_fail_is_told() -> None:
    value = layers({1: 8.0})
    value["agreement"]["without"]["cosine"] = 0.999999
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert found["without"].reached is False
    assert "say little" in found["without"].note


def test_a_larger_batch_is_worth_it_until_computation_hides_transfers() -> None:
    ours = {1: 12.0, 8: 90.0, 16: 170.0, 32: 165.0}
    _, found = figures_of(report_of(ours, {}))
    assert found["compute_bound"].value == 16
    assert "C 80.0 ms, T 80.0 ms at 16; 170 tokens/s there" in found["compute_bound"].note
    assert found["growth"].value == pytest.approx(170 / 90)
    _, found = figures_of(report_of({1: 12.0, 2: 25.0, 4: 20.0}, {}))
    assert found["compute_bound"].value is None
    assert found["compute_bound"].note.startswith("none up to 4: ")
    assert found["growth"].reached is False
    assert found["growth"].note == "at batch 4"


def test_resident_layers_are_told_what_they_are_worth() -> None:
    value = layers({1: 12.0})
    value["setting"]["resident_layers"] = 4
    value["without_resident"] = decode(1, 10.0)
    value["decode"][0]["memory"]["resident_bytes"] = 480 * MIB
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert found["resident"].value == pytest.approx(1.2)
    assert found["resident"].what == "decode at batch 1 with 4 resident layers over none"
    assert found["resident"].note == "83.33 ms, not 100.00 ms, for 480 MiB more"
    assert "resident" not in figures_of(report_of({1: 12.0}, {}))[1]


def test_a_small_model_owes_no_share_of_the_bound() -> None:
    value = layers({1: 8.0})
    value["decode"][0]["memory"]["streamed_bytes"] = 90 * MIB
    _, found = figures_of(LayersReport(msgspec.convert(value, Layers)))
    assert found["bound_share"].wanted is None


rates = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(1, 100), max_size=5)


@given(rates, rates)
def test_ahead_from_a_batch_is_ahead_at_every_larger_one(
    ours: dict[int, float], theirs: dict[int, float]
) -> None:
    found = report_of(ours, theirs)
    first = found.ahead_from("partial")
    # As they are read back: 1e3 / (1e3 / x) is not always x.
    read = {row.batch: row.logits_tokens_s for row in found.layers.decode}
    both = sorted(ours.keys() & theirs.keys())
    ahead = [read[batch] > theirs[batch] for batch in both]
    if first is None:
        assert not ahead or not ahead[-1]
    else:
        at = both.index(first)
        assert all(ahead[at:])
        assert at == 0 or not ahead[at - 1]
    assert found.ahead_from("cpu") is None


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


def test_the_table_has_a_row_per_batch_and_a_column_per_way() -> None:
    found = report_of({1: 11.0, 2: 22.0, 512: 1000.0}, {1: 5.0, 2: 30.0})
    found.beside["cpu"] = Beside([BesideRow(2, 9.0, [1.0], -1, 0)], [], {}, [])
    report, _ = figures_of(found)
    lines = report.more.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("decode (T, C")
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "512"]
    assert lines[5].endswith("(-: see the notes)")
    # llama.cpp was not measured at 512.
    assert [line.split() for line in lines[7:]] == [
        ["1", "11", "5", "3", "-"],
        ["2", "22", "30", "3", "9"],
    ]
    assert report.notes[0].endswith("faster at batch 1 (2.20 x); slower at batch 2 (0.73 x)")


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


# --- orders of events ---


def setting(folder: Path, **extra: Any) -> Setting:
    model = BenchModel("m", str(folder / "m.gguf"), 1)
    return Setting("cuda:0", (model,), until_s=time.monotonic() + 100, extra=extra)


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


# --- the whole of it ---


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
