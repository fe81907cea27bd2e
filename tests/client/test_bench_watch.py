"""The watcher of the leak bench: at every new peak it asks what was going on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from vram_conductor.client.bench_watch import MemoryWatch, Peak
from vram_conductor.protocol.errors import Unavailable
from vram_conductor.protocol.status import DeviceStatus, LedgerStatus
from vram_conductor.protocol.values import Line, MoveRate

MIB = 1 << 20
WAIT_S = 30.0


def until(wanted: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < end, what
        threading.Event().wait(0.01)


def status(**counts: int) -> DeviceStatus:
    nothing = LedgerStatus(cap_bytes=0, promised_bytes=0)
    return DeviceStatus(
        device="cpu",
        kind="cpu",
        mode="timeshare",
        promised=nothing,
        host=nothing,
        resident=[Line("base", 600 * MIB)],
        rates={kind: MoveRate(count=count) for kind, count in counts.items()},
    )


def test_a_peak_tells_what_was_done_and_what_has_moved() -> None:
    answers = iter([status(load=2), *(status(load=2, wake_pool=at) for at in range(1, 1000))])
    with MemoryWatch("cpu", os.getpid(), look=lambda: next(answers)) as watch:
        until(lambda: bool(watch.peaks), "the first sample is a peak")
        assert watch.peaks[0].moved == {"load": 2}
        watch.doing("w0", "decode")
        watch.doing("w1", "lease")
        before = len(watch.peaks)
        most = max(watch.used_bytes)
        taken = bytearray(b"x" * (64 * MIB))
        until(lambda: watch.peaks[-1].bytes > most + len(taken) // 2, "a larger one")
    assert len(watch.peaks) > before
    peak = watch.peaks[-1]
    assert peak.bytes == max(watch.used_bytes)
    assert [what for what, _ in peak.doing] == ["w0: decode", "w1: lease"]
    assert all(seconds >= 0 for _, seconds in peak.doing)
    assert set(peak.moved) == {"wake_pool"}, "since the peak before"
    assert peak.lines == {"base": 600 * MIB}
    assert "during w0: decode (" in watch.why()
    shown = watch.plain()["peaks"]
    assert isinstance(shown, list)
    assert shown[-1]["bytes"] == peak.bytes
    assert shown[-1]["moved"] == peak.moved


def test_a_broker_that_does_not_answer_costs_the_reason_and_no_sample() -> None:
    def gone() -> DeviceStatus:
        raise Unavailable("no_broker", "nobody answers")

    with MemoryWatch("cpu", os.getpid(), look=gone) as watch:
        watch.doing("", "a switch to b")
        watch.now()
    assert watch.peaks[-1].bytes == max(watch.used_bytes)
    assert (watch.peaks[-1].moved, watch.peaks[-1].lines) == ({}, {})


@pytest.mark.parametrize(
    ("peak", "text"),
    [
        (Peak(0.0, 1, [], {}, {}), "during nothing; moved: -; lines: -"),
        (
            Peak(0.0, 1, [("a switch to b", 0.25)], {"b": 2, "a": 1}, {"base": 3 * MIB}),
            "during a switch to b (0.25 s); moved: 1 a, 2 b; lines: base 3.0",
        ),
    ],
)
def test_a_peak_in_words(peak: Peak, text: str) -> None:
    assert peak.why() == text
