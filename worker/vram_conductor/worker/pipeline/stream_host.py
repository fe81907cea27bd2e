"""The two streams of a host without a GPU: a thread that copies and a thread that computes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.streams import Mark, Span, Stream

Fill = Callable[[int, NDArray[np.uint8]], None]
"""``fill(unit, slot)`` writes a unit's bytes into a slot (uint8, ``slot_bytes`` long)."""

_ALIGNMENT = 256
"""Of slots, in bytes, as on a device."""


@dataclass(frozen=True)
class HostMark:
    """Done once ``event`` is set, also if it was left out after an error."""

    event: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class _Task:
    unit: int
    at_pass: int
    work: Callable[[], None]
    after: HostMark | None
    mark: HostMark = field(default_factory=HostMark)


class _Failure:
    """The first error of either thread. Until it is taken, nothing more is begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.stop = False

    def set(self, error: BaseException | None) -> None:
        with self._lock:
            self.stop = True
            self._error = self._error or error

    def take(self) -> BaseException | None:
        with self._lock:
            error, self._error = self._error, None
            self.stop = False
        return error


class _Lane:
    """One stream: does one task after the other, each after the mark that it waits for."""

    def __init__(self, stream: Stream, failure: _Failure, timed: bool, cores: set[int]) -> None:
        self._cores = cores
        self._timed = timed
        self.spans: list[Span] = []
        self.last: HostMark | None = None
        self._stream: Stream = stream
        self._failure = failure
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._loop, name=f"pipeline {stream}", daemon=True)
        self.thread.start()

    def put(self, task: _Task) -> HostMark:
        self.last = task.mark
        self._queue.put(task)
        return task.mark

    def end(self) -> None:
        self._queue.put(None)

    def _loop(self) -> None:
        # What a container does not allow is only slower.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, self._cores)
        while (task := self._queue.get()) is not None:
            if task.after is not None:
                task.after.event.wait()
            if not self._failure.stop:
                self._do(task)
            task.mark.event.set()
            # Its work may hold arrays: not until the next one comes.
            del task

    def _do(self, task: _Task) -> None:
        start = time.perf_counter()
        try:
            task.work()
        except BaseException as error:
            self._failure.set(error)
            return
        end = time.perf_counter()
        if self._timed:
            self.spans.append(Span(self._stream, task.unit, 1e3 * start, 1e3 * end, task.at_pass))


class HostStreams:
    """Slots in main memory. Whatever a stream does should release the interpreter (copies and
    ufuncs of NumPy do), or nothing overlaps.

    Args:
        fill: runs in the transfer thread.
        n_slots: how many buffers.
        slot_bytes: size of each: the largest unit that travels.
        timed: keep when everything ran, for :meth:`spans`.
    """

    def __init__(self, fill: Fill, n_slots: int, slot_bytes: int, *, timed: bool = True) -> None:
        self.n_slots = n_slots
        self._fill = fill
        self._slots = [_aligned(slot_bytes) for _ in range(n_slots)]
        self._failure = _Failure()
        self._lanes = {
            stream: _Lane(stream, self._failure, timed, cores) for stream, cores in _cores().items()
        }
        # Who is dropped without being closed leaves no thread that waits for ever.
        self._end = weakref.finalize(self, _end, tuple(self._lanes.values()))
        self._open = True

    def slot(self, index: int) -> NDArray[np.uint8]:
        return self._slots[index]

    def transfer(self, unit: int, slot: int, after: Mark | None, *, at_pass: int = 0) -> HostMark:
        buffer = self._slots[slot]
        return self._put("transfer", unit, lambda: self._fill(unit, buffer), after, at_pass)

    def compute(
        self, unit: int, work: Callable[[], None], after: Mark | None, *, at_pass: int = 0
    ) -> HostMark:
        return self._put("compute", unit, work, after, at_pass)

    def _put(
        self, stream: Stream, unit: int, work: Callable[[], None], after: Mark | None, at_pass: int
    ) -> HostMark:
        assert self._open
        assert after is None or isinstance(after, HostMark)
        return self._lanes[stream].put(_Task(unit, at_pass, work, after))

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, HostMark)
        mark.event.wait()
        if self._failure.stop:
            self.synchronise()

    def synchronise(self) -> None:
        for lane in self._lanes.values():
            if lane.last is not None:
                lane.last.event.wait()
        error = self._failure.take()
        if error is not None:
            raise error

    def spans(self) -> list[Span]:
        found: list[Span] = []
        for lane in self._lanes.values():
            found += lane.spans
            lane.spans = []
        return found

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._failure.set(None)
        self._end()
        for lane in self._lanes.values():
            lane.thread.join()
        self._slots = []


def _end(lanes: Iterable[_Lane]) -> None:
    for lane in lanes:
        lane.end()


def _cores() -> dict[Stream, set[int]]:
    """Cores for each stream's thread. Linux likes to wake a thread on the core of the one that
    wakes it: these two would take turns on one core while another one is idle."""
    every = os.sched_getaffinity(0)
    last = {max(every)}
    return {"transfer": last, "compute": every - last or every}


def _aligned(n_bytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(n_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + n_bytes]
