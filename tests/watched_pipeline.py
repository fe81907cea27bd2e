"""A pipeline on threads whose computations look at their units."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule
from vram_conductor.worker.pipeline.stream_host import HostStreams

SLOT_BYTES = 64 << 10


def pattern(unit: int) -> int:
    return unit + 1


def fill(unit: int, slot: NDArray[np.uint8]) -> None:
    """In two halves, so that a computation that comes too early sees a torn one."""
    slot[: SLOT_BYTES // 2] = pattern(unit)
    slot[SLOT_BYTES // 2 :] = pattern(unit)


class Watching:
    """A computation that looks at its slot from beginning to end."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, unit: int, slot: Any) -> None:
        if slot is not None:
            for _ in range(3):
                assert np.all(slot == pattern(unit)), f"unit {unit} was not there"
        self.seen.append(unit)


@contextmanager
def pipeline(
    n_units: int,
    slots: int = 2,
    resident: frozenset[int] = frozenset(),
    fill: Callable[[int, NDArray[np.uint8]], None] = fill,
    kind: type[HostStreams] = HostStreams,
) -> Generator[Pipeline]:
    streams = kind(fill, slots, SLOT_BYTES)
    threads = [lane.thread for lane in streams._lanes.values()]
    try:
        yield Pipeline(streams, Schedule(n_units, slots, resident))
    finally:
        streams.close()
    streams.close()
    assert not any(thread.is_alive() for thread in threads)
