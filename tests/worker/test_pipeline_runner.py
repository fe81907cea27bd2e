"""A schedule on real threads: every computation sees its own unit, errors leave nothing behind."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from watched_pipeline import Watching, fill, pipeline

from vram_conductor.worker.pipeline.stream_host import HostMark, HostStreams
from vram_conductor.worker.pipeline.streams import Mark

WAIT_S = 20.0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(2, 4),
    st.frozensets(st.integers(0, 6)),
    st.lists(st.sampled_from(["ahead", "alone", "serial", "restart", "wait"]), max_size=6),
)
def test_every_computation_finds_its_unit(
    n_units: int, slots: int, chosen: frozenset[int], passes: list[str]
) -> None:
    resident = frozenset(unit for unit in chosen if unit < n_units)
    work, ran = Watching(), 0
    with pipeline(n_units, slots, resident) as line:
        for what in passes:
            if what in ("ahead", "alone"):
                line.run(work, ahead=what == "ahead")
                ran += 1
            elif what == "serial":
                line.run_serial(work)
                ran += 1
            else:
                {"restart": line.restart, "wait": line.synchronise}[what]()
        line.synchronise()
        assert work.seen == list(range(n_units)) * ran
        spans = line.streams.spans()
    for stream in ("transfer", "compute"):
        mine = [span for span in spans if span.stream == stream]
        ends = [0.0, *[span.end_ms for span in mine]]
        assert all(span.start_ms >= end for span, end in zip(mine, ends, strict=False))
    assert len([span for span in spans if span.stream == "compute"]) == n_units * ran


def test_the_next_unit_travels_while_one_computes_over_the_end_of_a_pass_too() -> None:
    """Each computation ends only once the transfer after its own is done."""
    filled = [threading.Event() for _ in range(4)]
    count = iter(range(100))

    def announce(unit: int, slot: NDArray[np.uint8]) -> None:
        fill(unit, slot)
        at = next(count)
        if at < len(filled):
            filled[at].set()

    computed = iter(range(100))

    def work(unit: int, slot: Any) -> None:
        assert filled[next(computed) + 1].wait(WAIT_S), "nothing travels meanwhile"

    with pipeline(3, fill=announce) as line:
        line.run(work)
        line.synchronise()
    assert next(computed) == 3


def test_the_last_computation_is_waited_for_and_not_what_is_ahead() -> None:
    go_on = threading.Event()
    count = iter(range(100))

    def read(unit: int, slot: NDArray[np.uint8]) -> None:
        if next(count) == 4:
            assert go_on.wait(WAIT_S)
        fill(unit, slot)

    with pipeline(3, fill=read) as line:
        work = Watching()
        mark = line.run(work)
        line.wait(mark)
        assert work.seen == [0, 1, 2]
        go_on.set()
        line.wait(line.run(work))
        assert work.seen == [0, 1, 2] * 2


@pytest.mark.parametrize("bad", ["transfer", "compute"])
def test_waiting_says_what_failed(bad: str) -> None:
    def read(unit: int, slot: NDArray[np.uint8]) -> None:
        fill(unit, slot)
        if unit == 1 and bad == "transfer":
            raise OSError("unit 1")

    def work(unit: int, slot: Any) -> None:
        if unit == 1 and bad == "compute":
            raise OSError("unit 1")

    with pipeline(3, fill=read) as line:
        mark = line.run(work)
        with pytest.raises(OSError, match="unit 1"):
            line.wait(mark)
        again = Watching()
        bad = ""
        line.wait(line.run(again))
        assert again.seen == [0, 1, 2]


def test_a_serial_pass_overlaps_nothing() -> None:
    with pipeline(4) as line:
        line.run(Watching())
        line.synchronise()
        line.streams.spans()
        line.run_serial(Watching())
        spans = sorted(line.streams.spans(), key=lambda span: span.start_ms)
    last = spans[-8:]
    assert [span.stream for span in last] == ["transfer", "compute"] * 4
    assert all(a.end_ms <= b.start_ms for a, b in itertools.pairwise(last))


class AtOnce(HostStreams):
    """As on a GPU: ``work`` runs when it is put on the stream, and its errors come right then."""

    def compute(
        self, unit: int, work: Callable[[], None], after: Mark | None, *, at_pass: int = 0
    ) -> HostMark:
        assert isinstance(after, HostMark)
        assert after.event.wait(WAIT_S)
        work()
        return super().compute(unit, lambda: None, after, at_pass=at_pass)


@pytest.mark.parametrize("kind", [HostStreams, AtOnce])
@pytest.mark.parametrize("serial", [False, True])
def test_an_error_ends_the_pass_and_the_next_one_is_whole(
    kind: type[HostStreams], serial: bool
) -> None:
    seen: list[int] = []

    def work(unit: int, slot: Any) -> None:
        seen.append(unit)
        if unit == 2:
            raise ValueError("unit 2 is bad")

    with pipeline(5, kind=kind) as line:

        def once() -> None:
            (line.run_serial if serial else line.run)(work)
            line.synchronise()

        with pytest.raises(ValueError, match="unit 2 is bad"):
            once()
        assert seen == [0, 1, 2], "nothing is computed after it"
        again = Watching()
        line.run(again)
        line.synchronise()
        assert again.seen == list(range(5))


def test_an_error_of_a_transfer_is_said_and_its_unit_not_computed() -> None:
    bad = {3}

    def read(unit: int, slot: NDArray[np.uint8]) -> None:
        if unit in bad:
            raise OSError(5, "cannot be read")
        fill(unit, slot)

    with pipeline(5, fill=read) as line:
        work = Watching()
        line.run(work)
        with pytest.raises(OSError, match="cannot be read"):
            line.synchronise()
        assert 3 not in work.seen
        assert 4 not in work.seen
        line.synchronise()
        bad.clear()
        line.run(work := Watching())
        line.synchronise()
        assert work.seen == list(range(5))


def test_the_first_error_is_the_one_that_is_said() -> None:
    reading, failed = threading.Event(), threading.Event()

    def read(unit: int, slot: NDArray[np.uint8]) -> None:
        if unit == 1:
            reading.set()
            assert failed.wait(WAIT_S)
            raise OSError("the second")

    def work(unit: int, slot: Any) -> None:
        assert reading.wait(WAIT_S)
        raise KeyError("the first")

    with pipeline(2, fill=read) as line:
        line.run(work)
        deadline = time.monotonic() + WAIT_S
        while not line.streams._failure.stop:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
        failed.set()
        with pytest.raises(KeyError, match="the first"):
            line.synchronise()
        line.synchronise()
