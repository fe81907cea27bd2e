"""What is made of the figures of a model whose layers travel."""

from __future__ import annotations

import msgspec
import pytest
from layers_answers import MIB, decode, layers

from vram_conductor.client.bench_layers_figures import add_figures
from vram_conductor.client.bench_layers_found import Beside, BesideRow, Layers, LayersReport
from vram_conductor.client.bench_report import BenchReport, Figure


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
