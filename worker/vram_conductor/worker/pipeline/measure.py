"""What overlapping is worth: serial and overlapped passes on the same memory, each stream alone.

All times are taken by the streams themselves (CUDA events, or the clock of the thread that does
it), medians over repeats. What is compared is measured in turn, back and forth, so that a clock
that changes changes all of it; and in the same way: whole passes back to back, with whatever a
stream takes between two units.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule, bound, makespan_ms, single_pass_ms
from vram_conductor.worker.pipeline.streams import Span, Stream, Streams

T = TypeVar("T")

UNITS_MIN = 32
"""One figure is the mean of passes back to back that have so many units in all."""


class Payload(Protocol):
    """What travels and is computed; its results can be checked."""

    @property
    def streams(self) -> Streams:
        """That take times."""
        ...

    def work(self, unit: int, slot: Any) -> None:
        """For :meth:`Pipeline.run`."""

    def poison(self) -> None:
        """Make all results wrong, until they are computed again. The streams are idle."""

    def check(self) -> None:
        """Raises if a result is wrong. The streams are idle."""


@dataclass(frozen=True)
class Measurement:
    """Of one setting; ms per pass.

    Attributes:
        transfer_ms, compute_ms: each stream alone (T and C), passes back to back.
        serial_ms: transfer, synchronise, compute, synchronise.
        overlapped_ms: a pass among others, back to back.
        single_ms: a pass alone, from empty slots to the last computation.
        unit_transfer_ms, unit_compute_ms: per unit, each stream alone; medians over all passes.
        repeats: the first five, of every repeat, by their names without ``_ms``.
        serial, single: when everything was where, in the pass of median length.
    """

    transfer_ms: float
    compute_ms: float
    serial_ms: float
    overlapped_ms: float
    single_ms: float
    unit_transfer_ms: list[float]
    unit_compute_ms: list[float]
    repeats: dict[str, list[float]]
    serial: list[Span]
    single: list[Span]

    @property
    def bound(self) -> float:
        """The largest speedup that there can be."""
        return bound(self.transfer_ms, self.compute_ms)

    @property
    def share(self) -> float:
        """How much of the bound was reached: the longer stream alone over the pass."""
        return max(self.transfer_ms, self.compute_ms) / self.overlapped_ms

    @property
    def single_optimum_ms(self) -> float:
        """Shortest that a pass alone could be: its first transfer and its last computation hide
        behind nothing."""
        return single_pass_ms(self.unit_transfer_ms, self.unit_compute_ms)


class Rounds:
    """The passes that are measured, each kind by itself. All units travel.

    Args:
        n_units: of a pass.
    """

    def __init__(self, payload: Payload, n_units: int) -> None:
        self._payload = payload
        self._streams = payload.streams
        self._n_units = n_units
        self._pipeline = Pipeline(self._streams, Schedule(n_units, self._streams.n_slots))
        self._passes = -(-UNITS_MIN // n_units)

    def serial(self) -> list[Span]:
        """One pass in which nothing overlaps."""
        self._empty()
        self._pipeline.run_serial(self._payload.work)
        return self._streams.spans()

    def single(self) -> list[Span]:
        """One overlapped pass, from empty slots."""
        self._empty()
        self._pipeline.run(self._payload.work, ahead=False)
        self._pipeline.synchronise()
        return self._streams.spans()

    def overlapped_ms(self) -> float:
        """An overlapped pass among others, once as much is ahead as can be."""
        self._empty()
        lead = 1 + self._streams.n_slots // self._n_units
        for _ in range(lead + self._passes):
            self._pipeline.run(self._payload.work)
        self._pipeline.synchronise()
        return _pass_ms([span for span in self._streams.spans() if span.stream == "compute"], lead)

    def alone(self, stream: Stream) -> list[Span]:
        """Passes of one stream, with nothing on the other. What is computed on is stale."""
        return self._alone(stream, self._n_units, self._passes)

    def alone_ms(self, stream: Stream, n_units: int | None = None) -> float:
        """A pass of one stream alone, or the first ``n_units`` of it."""
        return makespan_ms(self._alone(stream, n_units or self._n_units, 1))

    def alone_pass_ms(self, spans: Sequence[Span]) -> float:
        """Mean time of the passes of one stream alone."""
        return makespan_ms(spans) / self._passes

    def _alone(self, stream: Stream, n_units: int, passes: int) -> list[Span]:
        self._empty()
        for at_pass in range(passes):
            for unit in range(n_units):
                self._put(stream, unit, at_pass)
        self._pipeline.synchronise()
        return self._streams.spans()

    def _put(self, stream: Stream, unit: int, at_pass: int) -> None:
        slot = unit % self._streams.n_slots
        if stream == "transfer":
            self._streams.transfer(unit, slot, None, at_pass=at_pass)
        else:
            work = partial(self._payload.work, unit, self._streams.slot(slot))
            self._streams.compute(unit, work, None, at_pass=at_pass)

    def _empty(self) -> None:
        self._pipeline.restart()
        self._streams.spans()


def measure(payload: Payload, n_units: int, repeats: int) -> Measurement:
    """Measure one setting, after warming everything up. The results of all passes that transfer and
    compute are checked.

    Args:
        n_units: of a pass.
        repeats: at least 1.

    Raises:
        Exception: what the payload raised.
    """
    rounds = Rounds(payload, n_units)
    _checked(payload, rounds.single)
    serial: list[list[Span]] = []
    single: list[list[Span]] = []
    overlapped_ms: list[float] = []
    transfers: list[list[Span]] = []
    computations: list[list[Span]] = []
    kinds: list[Callable[[], None]] = [
        lambda: serial.append(_checked(payload, rounds.serial)),
        lambda: transfers.append(rounds.alone("transfer")),
        lambda: overlapped_ms.append(_checked(payload, rounds.overlapped_ms)),
        lambda: computations.append(rounds.alone("compute")),
        lambda: single.append(_checked(payload, rounds.single)),
    ]
    for repeat in range(repeats):
        for run in kinds if repeat % 2 == 0 else reversed(kinds):
            run()
    found = {
        "transfer": [rounds.alone_pass_ms(spans) for spans in transfers],
        "compute": [rounds.alone_pass_ms(spans) for spans in computations],
        "serial": [makespan_ms(spans) for spans in serial],
        "overlapped": overlapped_ms,
        "single": [makespan_ms(spans) for spans in single],
    }
    unit_transfer_ms, unit_compute_ms = (
        _per_unit(spans, n_units) for spans in (transfers, computations)
    )
    return Measurement(
        transfer_ms=statistics.median(found["transfer"]),
        compute_ms=statistics.median(found["compute"]),
        serial_ms=statistics.median(found["serial"]),
        overlapped_ms=statistics.median(overlapped_ms),
        single_ms=statistics.median(found["single"]),
        unit_transfer_ms=unit_transfer_ms,
        unit_compute_ms=unit_compute_ms,
        repeats=found,
        serial=_middle(serial),
        single=_middle(single),
    )


def _checked(payload: Payload, run: Callable[[], T]) -> T:
    payload.poison()
    found = run()
    payload.check()
    return found


def _pass_ms(spans: Sequence[Span], lead: int) -> float:
    """Mean time of the passes from ``lead`` on: between the ends of passes, nothing is left out."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.at_pass] = max(span.end_ms, ends.get(span.at_pass, span.end_ms))
    last = max(ends)
    return (ends[last] - ends[lead - 1]) / (last - lead + 1)


def _per_unit(lists: Sequence[Sequence[Span]], n_units: int) -> list[float]:
    """Medians: on a busy host some take several times as long."""
    times: list[list[float]] = [[] for _ in range(n_units)]
    for spans in lists:
        for span in spans:
            times[span.unit].append(span.ms)
    return [statistics.median(unit) for unit in times]


def _middle(timelines: Sequence[list[Span]]) -> list[Span]:
    """The one whose length is the median."""
    return sorted(timelines, key=makespan_ms)[(len(timelines) - 1) // 2]
