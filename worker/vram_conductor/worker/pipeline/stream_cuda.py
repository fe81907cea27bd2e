"""The pipeline's two streams on a GPU: copies from pinned host memory beside kernels."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from vram_conductor.protocol.errors import Internal
from vram_conductor.worker.pipeline.gpu import DeviceMemory, Event, Gpu, PinnedMemory, Stream
from vram_conductor.worker.pipeline.streams import Mark, Span
from vram_conductor.worker.pipeline.streams import Stream as Kind


class CudaMark:
    """What was put on a stream.

    Attributes:
        end: None once it is known to be done; its events are then used for something else.
    """

    def __init__(self, span: tuple[Kind, int, int], start: Event | None, end: Event) -> None:
        self.span = span
        self.start = start
        self.end: Event | None = end


class CudaStreams:
    """See :class:`vram_conductor.worker.pipeline.streams.Streams`. What ``work`` raises comes from
    :meth:`compute` at once; an error of the device itself comes from any later call, and ends the
    use of the device in this process.

    Attributes:
        compute_stream: where ``work`` puts its kernels.
        payload: all units, on the host.

    Args:
        payload: belongs to the streams from now on, even if this raises.
        units: where each unit's bytes lie in it: (offset, bytes).
        n_slots: device buffers.
        slot_bytes: size of each; no unit that travels is larger.
        timed: keep when everything ran, for :meth:`spans`.

    Raises:
        ResourceExhausted: ``device_memory_short``.
    """

    def __init__(
        self,
        gpu: Gpu,
        payload: PinnedMemory,
        units: Sequence[tuple[int, int]],
        n_slots: int,
        slot_bytes: int,
        *,
        timed: bool = False,
    ) -> None:
        self.n_slots = n_slots
        self.payload = payload
        self._gpu = gpu
        self._timed = timed
        self.lay_out(units)
        self._slots: list[DeviceMemory] = []
        self._events: list[Event] = []
        self._idle: list[Event] = []
        self._marks: dict[Kind, deque[CudaMark]] = {"transfer": deque(), "compute": deque()}
        self._spans: list[Span] = []
        self._streams: list[Stream] = []
        try:
            self._transfer_stream = self._new_stream()
            self.compute_stream = self._new_stream()
            for _ in range(n_slots):
                self._slots.append(gpu.allocate(slot_bytes))
            self._zero = self._new_event()
            self._start_clock()
        except BaseException:
            self.close()
            raise

    def lay_out(self, units: Sequence[tuple[int, int]]) -> None:
        """From now on these are the units, no larger than the slots. The streams are idle."""
        self._units = [self.payload.array[offset : offset + size] for offset, size in units]

    def slot(self, index: int) -> int:
        return self._slots[index].address

    def transfer(self, unit: int, slot: int, after: Mark | None, *, at_pass: int = 0) -> CudaMark:
        data, memory = self._units[unit], self._slots[slot]
        assert data.nbytes <= memory.n_bytes

        def copy() -> None:
            self._gpu.copy_to_device(memory.address, data, self._transfer_stream)

        return self._put(("transfer", unit, at_pass), self._transfer_stream, copy, after)

    def compute(
        self, unit: int, work: Callable[[], None], after: Mark | None, *, at_pass: int = 0
    ) -> CudaMark:
        return self._put(("compute", unit, at_pass), self.compute_stream, work, after)

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark)
        if mark.end is not None:
            mark.end.synchronise()
        self._retire()

    def synchronise(self) -> None:
        self._transfer_stream.synchronise()
        self.compute_stream.synchronise()
        self._retire()

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        if not any(self._marks.values()):
            self._start_clock()
        return spans

    def close(self) -> None:
        # After an error of the device nothing more is waited for, and little given back: the
        # driver does it when the process ends.
        with contextlib.suppress(Internal):
            for stream in self._streams:
                stream.synchronise()
        for event in self._events:
            event.close()
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        for memory in self._slots:
            memory.free()
        self._units.clear()
        self.payload.free()

    def _put(
        self,
        span: tuple[Kind, int, int],
        stream: Stream,
        work: Callable[[], None],
        after: Mark | None,
    ) -> CudaMark:
        self._retire()
        assert after is None or isinstance(after, CudaMark)
        if after is not None and after.end is not None:
            stream.wait(after.end)
        start = self._take_event() if self._timed else None
        if start is not None:
            # After the wait: the time is what it takes, not what it waits.
            start.record(stream)
        try:
            work()
        except BaseException:
            if start is not None:
                self._idle.append(start)
            raise
        end = self._take_event()
        end.record(stream)
        mark = CudaMark(span, start, end)
        self._marks[span[0]].append(mark)
        return mark

    def _retire(self) -> None:
        """Take the times and the events of what is done."""
        for marks in self._marks.values():
            while marks and (end := marks[0].end) is not None and end.done():
                mark = marks.popleft()
                mark.end = None
                self._idle.append(end)
                if mark.start is not None:
                    kind, unit, at_pass = mark.span
                    began_ms, ended_ms = mark.start.ms_since(self._zero), end.ms_since(self._zero)
                    self._spans.append(Span(kind, unit, began_ms, ended_ms, at_pass))
                    self._idle.append(mark.start)

    def _start_clock(self) -> None:
        """Times are told as 32-bit floats: near zero they are exact."""
        self._zero.record(self.compute_stream)
        self._zero.synchronise()

    def _new_stream(self) -> Stream:
        self._streams.append(self._gpu.stream())
        return self._streams[-1]

    def _take_event(self) -> Event:
        return self._idle.pop() if self._idle else self._new_event()

    def _new_event(self) -> Event:
        self._events.append(self._gpu.event(self._timed))
        return self._events[-1]
