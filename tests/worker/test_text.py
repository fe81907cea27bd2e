"""Streamed text equals the whole text, for every script, split anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vram_conductor.worker.text import TextStream, first_stop, whole_text

SCRIPTS = [
    "plain ascii",
    "Grüße, naïve café",
    "日本語のテキスト、漢字かな交じり",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈",
    "zero\u200bwidth\u200djoiner\ufeff",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "\U0010ffff\x00\x7f",
]


def stream(pieces: list[bytes], stops: list[str]) -> tuple[list[str], str | None]:
    text = TextStream(stops)
    parts: list[str] = []
    for piece in pieces:
        parts.append(text.push(piece))
        if text.stopped_by is not None:
            break
    parts.append(text.finish())
    return parts, text.stopped_by


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[a:b] for a, b in itertools.pairwise([0, *at, len(data)])]


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_stay_whole_however_bytes_are_split(text: str, size: int) -> None:
    data = text.encode()
    parts, _ = stream([data[i : i + size] for i in range(0, len(data), size)], [])
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@given(st.text(), st.lists(st.integers(0, 400)), st.lists(st.text(min_size=1, max_size=4)))
@example("abcabd", [1, 2, 3, 4, 5], ["abd"])
@example("aab", [1, 2], ["ab"])
@example("xaaab", [1, 2, 3, 4], ["aab", "aaaab"])
@example("一二三", [1, 2, 4, 5], ["二"])
def test_stream_equals_whole_text(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces = split(text.encode("utf-8", "surrogatepass"), cuts)
    parts, _ = stream(pieces, stops)
    assert "".join(parts) == whole_text(pieces, stops)


@given(st.text("ab"), st.lists(st.integers(0, 60)), st.lists(st.text("ab", min_size=1), max_size=4))
def test_overlapping_stop_strings(text: str, cuts: list[int], stops: list[str]) -> None:
    pieces = split(text.encode(), cuts)
    parts, stopped_by = stream(pieces, stops)
    assert "".join(parts) == whole_text(pieces, stops)
    assert (stopped_by is not None) == any(stop in text for stop in stops)


@given(st.binary(), st.lists(st.integers(0, 60)))
def test_any_bytes_equal_their_whole_decoding(data: bytes, cuts: list[int]) -> None:
    parts, _ = stream(split(data, cuts), [])
    assert "".join(parts) == data.decode("utf-8", "replace")


def test_an_unfinished_character_waits_and_ends_as_one_replacement() -> None:
    text = TextStream()
    assert text.push("a😀".encode()[:3]) == "a"
    assert text.push(b"") == ""
    assert text.finish() == "\ufffd"


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    text = TextStream(["\n\nUser:"])
    assert text.push(b"hello\n") == "hello"
    assert text.push(b"world") == "\nworld"
    assert text.push(b"\n\nUs") == ""
    assert text.push(b"er") == ""
    assert text.push(b": next") == ""
    assert text.stopped_by == "\n\nUser:"
    assert text.push(b"more") == ""
    assert text.finish() == ""


def test_held_back_text_comes_out_at_the_end() -> None:
    text = TextStream(["STOP"])
    assert text.push(b"no ST") == "no "
    assert text.finish() == "ST"
    assert text.stopped_by is None


def test_the_stop_string_that_ends_first_wins_and_the_longest_at_one_place() -> None:
    assert first_stop("one two", ["two", "one two", "ne"]) == (1, "ne")
    assert first_stop("xyz", ["z", "yz"]) == (1, "yz")
    assert first_stop("xyz", ["q"]) is None


def test_empty_stop_strings_are_ignored() -> None:
    parts, stopped_by = stream([b"abc"], [""])
    assert "".join(parts) == "abc"
    assert stopped_by is None
