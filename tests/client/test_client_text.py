"""Numbers, tables and bars for people."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.client.text import (
    bar,
    duration,
    plural,
    printable,
    shorten,
    size,
    table,
    wrapped,
)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 6, "9.99 KiB"),
        (10 * 1024 - 5, "10.0 KiB"),
        (1610612736, "1.50 GiB"),
        (100 * 1024 - 1, "100 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (8 << 30, "8.00 GiB"),
        (1 << 62, "4194304 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_size(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


@given(st.integers(0, 1023 << 40))
def test_size_has_three_significant_digits(n_bytes: int) -> None:
    number, unit = size(n_bytes).split()
    assert float(number) < 1024
    exponent = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(number) * 1024**exponent - n_bytes) <= 0.0051 * n_bytes


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0 ms"),
        (0.44, "0.4 ms"),
        (9.94, "9.9 ms"),
        (9.96, "10 ms"),
        (35, "35 ms"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (1234, "1.23 s"),
        (9_999, "10.0 s"),
        (32_050, "32.0 s"),
        (59_949, "59.9 s"),
        (59_951, "1 min 0 s"),
        (125_000, "2 min 5 s"),
        (3_599_600, "1 h 0 min"),
        (12_000_000, "3 h 20 min"),
        (360_000_000, "4 d 4 h"),
    ],
)
def test_duration(ms: float, text: str) -> None:
    assert duration(ms) == text


def test_plural() -> None:
    assert [plural(count, "agent") for count in (0, 1, 2)] == ["0 agents", "1 agent", "2 agents"]


@given(st.text(max_size=40), st.integers(1, 50))
def test_shorten_keeps_both_ends_and_the_width(text: str, width: int) -> None:
    short = shorten(text, width)
    assert len(short) <= width
    if len(text) <= width:
        assert short == text
    elif width > 1:
        assert "…" in short
        assert short[: width // 2] == text[: width // 2]


def test_wrapped_hangs_what_follows_and_breaks_no_word() -> None:
    text = wrapped("one two ipc:///a/very/long/path three", 16, 2, 2)
    assert text.splitlines() == ["  one two", "    ipc:///a/very/long/path", "    three"]


def test_table_aligns() -> None:
    drawn = table(["name", "n"], [["a", "1"], ["bcdef", "100"]], right=(1,))
    assert drawn.splitlines() == ["name     n", "a        1", "bcdef  100"]


def test_table_without_rows_is_its_header() -> None:
    assert table(["name", "n"], []) == "name  n"


def test_table_squeezes_the_widest_first() -> None:
    rows = [["x" * 30, "y" * 20, "12345"]]
    drawn = table(["a", "b", "c"], rows, width=44, squeeze=(0, 1))
    assert max(map(len, drawn.splitlines())) == 44
    cells = drawn.splitlines()[1].split()
    assert [len(cell) for cell in cells] == [18, 17, 5] or [len(c) for c in cells] == [17, 18, 5]
    assert cells[2] == "12345"


def test_table_wraps_what_may_not_be_lost() -> None:
    text = "words that go over several lines, all of them"
    drawn = table(["", "figures"], [["ok", text], ["no", "short"]], width=24, wrap=(1,))
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 24
    assert " ".join(line[4:].strip() for line in lines[1:-1]) == text
    assert lines[-1] == "no  short"


def test_table_goes_on_where_nothing_more_can_be_taken() -> None:
    drawn = table(["a", "b"], [["x" * 30, "y" * 30]], width=10, squeeze=(0,))
    assert drawn.splitlines()[1] == shorten("x" * 30, 8) + "  " + "y" * 30


def test_bar_gives_every_part_a_character_and_cuts_what_is_over() -> None:
    assert bar([("W", 50), ("P", 25)], 100, 8) == "WWWWPP.."
    assert bar([("W", 1), ("P", 1)], 10**9, 8) == "WP......"
    assert bar([("W", 300)], 100, 8) == "WWWWWWWW"
    assert bar([("W", 1 << 50), ("f", 1 << 62)], 1, 8) == "WWWWWWWW", "and takes no time"
    assert bar([], 100, 4) == "...."
    assert bar([("W", 5)], 0, 4) == "...."
    assert bar([("W", 0), ("P", 100)], 100, 4) == "PPPP"


def test_bar_is_as_wide_as_asked(rng: random.Random) -> None:
    for _ in range(300):
        parts = [(mark, rng.randrange(0, 1000)) for mark in "bWPsLf"]
        total, width = rng.randrange(1, 3000), rng.randrange(6, 80)
        drawn = bar(parts, total, width)
        assert len(drawn) == width
        assert list(drawn.rstrip(".")) == sorted(drawn.rstrip("."), key="bWPsLf".index)


def test_printable_lets_no_control_character_through() -> None:
    assert printable("plain ünïcode 👩‍💻\n\ttext") == "plain ünïcode 👩‍💻\n\ttext"
    assert printable("a\x1b[31mb\x07\x9bc\x00") == "a�[31mb��c�"
    assert printable("a\r\nb") == "a\nb"
