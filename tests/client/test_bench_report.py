"""Figures, percentiles, token times, differences of move rates: the arithmetic of the benches."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client.bench_bed import Bed
from vram_conductor.client.bench_parallel import summed_up
from vram_conductor.client.bench_report import BenchReport, Figure, number, percentile
from vram_conductor.client.bench_sizes import ModelSizes, Sizes
from vram_conductor.client.bench_stream import Stream
from vram_conductor.client.bench_turns import between, gb_s
from vram_conductor.protocol.values import MoveRate


@pytest.mark.parametrize(
    ("value", "wanted", "relation", "reached"),
    [
        (5.0, 5.0, "<=", True),
        (5.1, 5.0, "<=", False),
        (2.0, 2.0, ">=", True),
        (1.9, 2.0, ">=", False),
        (None, 2.0, ">=", None),
        (7.0, None, "<=", None),
    ],
)
def test_a_figure_knows_whether_it_is_as_wanted(
    value: float | None, wanted: float | None, relation: str, reached: bool | None
) -> None:
    figure = Figure("key", "what", value, "ms", wanted, relation)  # type: ignore[arg-type]
    assert figure.reached is reached
    assert ("MISSED" in figure.row()) == (reached is False)


def test_a_report_says_the_same_to_people_and_programs() -> None:
    report = BenchReport("switch", "cpu", figures=[Figure("a", "took", 1234.5, "ms", 2000)])
    report.notes.append("a note")
    report.failures.append("a part: why")
    text, value = report.text(80), report.json()
    for part in ("took", "1,234 ms", "<= 2,000 ms", "reached", "note: a note", "a part: why"):
        assert part in text
    assert value["figures"][0]["reached"] is True
    assert value["failures"] == ["a part: why"]
    assert max(map(len, text.splitlines())) <= 80
    report.add(Figure("b", "many words " * 20, None, note="and as many again " * 20))
    assert max(map(len, report.text(80).splitlines())) <= 80
    assert BenchReport("empty", "cpu").text(80)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(
    values: list[float], share: float
) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values)


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "0.12 x"), (12.34, "12.3 x"), (1234.5, "1,234 x"), (3, "3 x")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value, "x") == text


def stream(pieces: list[tuple[float, int]]) -> Stream:
    """A stream whose pieces came after so many ms with so many tokens."""
    found = Stream.__new__(Stream)
    found.at_s, found.counts, found._first = [0.0], [1], threading.Event()
    for gap_ms, count in pieces:
        found.at_s.append(found.at_s[-1] + gap_ms / 1000)
        found.counts.append(found.counts[-1] + count)
    return found


@given(st.lists(st.tuples(st.floats(0.1, 1000), st.integers(1, 8)), min_size=1))
def test_token_times_add_up_and_never_hide_a_late_one(pieces: list[tuple[float, int]]) -> None:
    found = stream(pieces)
    gaps = found.token_gaps_ms()
    assert len(gaps) == sum(count for _, count in pieces)
    assert sum(gaps) == pytest.approx(sum(gap for gap, _ in pieces), rel=1e-6)
    assert min(gaps) >= 0
    # Spread evenly, a message of eight would look eight times better than its worst token.
    even = [gap / count for gap, count in pieces for _ in range(count)]
    assert max(gaps) >= max(even) - 1e-9
    assert found.tokens_per_s() == pytest.approx(len(gaps) / (sum(gaps) / 1000), rel=1e-6)


def test_a_window_of_a_stream_counts_only_what_is_inside() -> None:
    found = stream([(10, 1), (10, 1), (100, 4), (10, 1)])
    assert found.tokens_per_s(0.0, 0.0201) == pytest.approx(100)
    assert found.piece_gaps_ms(0.019, 1.0) == pytest.approx([100, 10])
    assert found.p95_ms() > 50
    assert stream([]).tokens_per_s() == 0


def test_what_moved_between_two_readings() -> None:
    before = {"state_in": MoveRate(count=2, bytes=100, ms=2.0)}
    after = {
        "state_in": MoveRate(count=3, bytes=2_000_100, ms=3.0, last_bytes=2_000_000, last_ms=1.0),
        "wake_pool": MoveRate(count=1, bytes=5, ms=0.0),
    }
    found = between(before, after)
    assert (found["state_in"].count, found["state_in"].bytes) == (1, 2_000_000)
    assert gb_s(found["state_in"]) == pytest.approx(2.0)
    assert gb_s(found["wake_pool"]) is None
    assert gb_s(None) is None
    assert between(after, after) == {}


def test_a_capacity_holds_each_set_and_no_model_more() -> None:
    model = ModelSizes(weights=600 << 20, pool=400 << 20, scratch=10 << 20, state=1)
    small = ModelSizes(weights=200 << 20, pool=100 << 20, scratch=5 << 20, state=1)
    sizes = Sizes(base=500 << 20, foreign=7 << 20, models={"big": model, "small": small})
    fixed = (500 + 7 + 10 + 5) << 20
    one = sizes.capacity([["big"], ["small"]])
    assert fixed + model.movable <= one < fixed + model.movable + small.movable
    both = sizes.capacity([["big", "small"], ["big"]])
    assert both >= fixed + model.movable + small.movable


def test_errors_of_the_product_itself_are_found_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    error = [
        "Traceback (most recent call last):",
        '  File "x.py", line 1',
        "    go()",
        "OSError: no",
    ]
    log.write_text("\n".join(["INFO good", *error, "INFO goes on", "  indented", *error]))
    bed = Bed("cpu", SimpleNamespace(log=log), None)  # type: ignore[arg-type]
    said = ["INFO good", *error, "  indented", *error]
    assert bed.complaints() == ["\n".join(["the log says:", *said])]
    log.write_text("INFO good\n  indented\n")
    assert bed.complaints() == []


def test_who_died_of_a_signal_and_where_it_was_is_in_the_report(tmp_path: Path) -> None:
    log = tmp_path / "log"
    crash = [
        "CUDA error: operation not permitted",
        "  current device: 0, in function f at x.cu:1",
        "/x.cu:98: CUDA error",
        "Fatal Python error: Aborted",
        "",
        "Thread 0x01 (most recent call first):",
        '  File "lane.py", line 1 in _loop',
    ]
    log.write_text("\n".join(["INFO good", *crash, "INFO a new one", "  indented", "", "x"]))
    said = ["worker cuda:0 (pid 7) died after 2.0 s: SIGABRT; starting it again in 0.10 s"]
    bed = Bed("cpu", SimpleNamespace(log=log), None, said)  # type: ignore[arg-type]
    assert bed.complaints() == [*said, "\n".join(["the log says:", *crash])]


def parallel_stream(began_s: float, first_s: float, rate: float, tokens: int) -> Stream:
    found = Stream.__new__(Stream)
    found.began_s = began_s
    found.at_s = [first_s + at / rate for at in range(tokens)]
    found.counts = [1 + at for at in range(tokens)]
    return found


def test_a_slow_model_that_ends_alone_counts_in_one_ratio_and_not_in_the_other() -> None:
    alone = [parallel_stream(10.0 * at, 10.0 * at, 100.0, 101) for at in range(3)]
    rates = (50.0, 100.0, 100.0)
    both = [parallel_stream(100.0, 100.0, rate, 101) for rate in rates]
    found = summed_up(alone, both)
    assert found.alone == pytest.approx([100.0, 100.0, 100.0])
    assert found.beside == pytest.approx([50.0, 100.0, 100.0])
    assert found.window_ratio == pytest.approx(2.5)
    assert found.in_turn == pytest.approx(101.0)
    assert found.at_once == pytest.approx(303 / 2.0)
    assert found.ratio == pytest.approx(1.5)


def test_models_that_never_stream_together_gain_nothing_while_they_do() -> None:
    alone = [parallel_stream(10.0 * at, 10.0 * at, 100.0, 101) for at in range(2)]
    both = [parallel_stream(0.0, 5.0 * at, 100.0, 101) for at in range(2)]
    assert summed_up(alone, both).window_ratio == 0
