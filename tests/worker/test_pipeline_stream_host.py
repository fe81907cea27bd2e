"""The two threads of a host that has no GPU: their slots, cores, times and end."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from watched_pipeline import SLOT_BYTES, Watching, fill, pipeline

from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule
from vram_conductor.worker.pipeline.stream_host import HostStreams

WAIT_S = 20.0


def test_untimed_streams_tell_no_spans() -> None:
    streams = HostStreams(fill, 2, SLOT_BYTES, timed=False)
    line = Pipeline(streams, Schedule(3, 2))
    line.run(Watching())
    line.synchronise()
    assert streams.spans() == []
    streams.close()


def test_closing_does_not_begin_what_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    def work(unit: int, slot: Any) -> None:
        seen.append(unit)
        begun.set()
        assert go_on.wait(WAIT_S)

    streams = HostStreams(fill, 2, SLOT_BYTES)
    Pipeline(streams, Schedule(4, 2)).run(work)
    assert begun.wait(WAIT_S)
    closing = threading.Thread(target=streams.close)
    closing.start()
    # It has said that nothing more is to be begun before it waits.
    deadline = time.monotonic() + WAIT_S
    while not streams._failure.stop:
        assert time.monotonic() < deadline
    go_on.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert seen == [0]


def test_slots_begin_where_tensors_may() -> None:
    with pipeline(1, slots=4) as line:
        assert [line.streams.slot(at).ctypes.data % 256 for at in range(4)] == [0] * 4
        assert [line.streams.slot(at).nbytes for at in range(4)] == [SLOT_BYTES] * 4


def test_the_two_threads_have_no_core_in_common() -> None:
    mine = os.sched_getaffinity(0)
    found: dict[str, set[int]] = {}

    def read(unit: int, slot: NDArray[np.uint8]) -> None:
        found["transfer"] = os.sched_getaffinity(0)

    def work(unit: int, slot: Any) -> None:
        found["compute"] = os.sched_getaffinity(0)

    with pipeline(1, fill=read) as line:
        line.wait(line.run(work, ahead=False))
    assert found["transfer"] | found["compute"] == mine
    assert not found["transfer"] & found["compute"] or len(mine) == 1
    assert os.sched_getaffinity(0) == mine, "other threads stay where they are"


def test_one_core_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {min(os.sched_getaffinity(0))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: one)
    with pipeline(3) as line:
        work = Watching()
        line.wait(line.run(work))
        assert work.seen == [0, 1, 2]
