"""What is measured: what a device of known speed takes, exactly; and only right results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vram_conductor.protocol.errors import DataLoss
from vram_conductor.worker.pipeline.measure import Rounds, measure
from vram_conductor.worker.pipeline.streams import Mark, Span, Stream
from vram_conductor.worker.pipeline.synthetic import Synthetic
from vram_conductor.worker.pipeline.synthetic_host import SyntheticHost

KIB = 1 << 10


@dataclass(frozen=True)
class At:
    ms: float


class KnownStreams:
    """Streams on a clock of their own, on which everything takes as long as it is said to."""

    def __init__(self, n_slots: int, transfer_ms: float, compute_ms: float, wait_ms: float) -> None:
        self.n_slots = n_slots
        self._took_ms: dict[Stream, float] = {"transfer": transfer_ms, "compute": compute_ms}
        self._wait_ms = wait_ms
        self._free_ms: dict[Stream, float] = {"transfer": 0.0, "compute": 0.0}
        self._spans: list[Span] = []

    def slot(self, index: int) -> int:
        return index

    def transfer(self, unit: int, slot: int, after: Mark | None, *, at_pass: int = 0) -> At:
        return self._put("transfer", unit, after, at_pass)

    def compute(
        self, unit: int, work: Callable[[], None], after: Mark | None, *, at_pass: int = 0
    ) -> At:
        work()
        return self._put("compute", unit, after, at_pass)

    def _put(self, stream: Stream, unit: int, after: Mark | None, at_pass: int) -> At:
        ready_ms = after.ms if isinstance(after, At) else 0.0
        start_ms = max(self._free_ms[stream], ready_ms)
        end_ms = self._free_ms[stream] = start_ms + self._took_ms[stream]
        self._spans.append(Span(stream, unit, start_ms, end_ms, at_pass))
        return At(end_ms)

    def wait(self, mark: Mark) -> None:
        raise NotImplementedError

    def synchronise(self) -> None:
        """The host notices a little later, and goes on from there."""
        now_ms = max(self._free_ms.values()) + self._wait_ms
        self._free_ms = {"transfer": now_ms, "compute": now_ms}

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        pass


class Nothing:
    """A payload without bytes; the results are right once every unit was computed."""

    def __init__(self, streams: KnownStreams, n_units: int, forgets: int | None = None) -> None:
        self.streams = streams
        self._forgets = forgets
        self._all = set(range(n_units))
        self._computed: set[int] = set()

    def work(self, unit: int, slot: Any) -> None:
        if unit != self._forgets:
            self._computed.add(unit)

    def poison(self) -> None:
        self._computed.clear()

    def check(self) -> None:
        assert self._computed == self._all


TIMES = st.floats(0.125, 64.0)


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(2, 4), TIMES, TIMES, st.sampled_from([0.0, 0.5]))
def test_a_device_of_known_speed(n: int, slots: int, t: float, c: float, wait: float) -> None:
    streams = KnownStreams(slots, t, c, wait)
    found = measure(Nothing(streams, n), n, repeats=2)

    def near(value: float) -> Any:
        return pytest.approx(value, rel=1e-9)

    assert found.transfer_ms == near(n * t)
    assert found.compute_ms == near(n * c)
    assert found.overlapped_ms == near(n * max(t, c))
    assert found.serial_ms == near(n * (t + c) + (2 * n - 1) * wait)
    assert found.single_ms == near((n - 1) * max(t, c) + t + c)
    assert found.single_optimum_ms == near(found.single_ms)
    assert found.share == near(1.0)
    assert found.bound == near((t + c) / max(t, c))
    assert found.unit_transfer_ms == pytest.approx([t] * n)
    assert found.unit_compute_ms == pytest.approx([c] * n)
    assert {len(values) for values in found.repeats.values()} == {2}
    assert [span.unit for span in found.serial] == [unit for unit in range(n) for _ in "tc"]
    assert sorted(span.unit for span in found.single if span.stream == "transfer") == list(range(n))


def test_medians_and_the_pass_that_is_shown() -> None:
    """One repeat in three is slow: no figure and no picture shows it."""

    class Sometimes(KnownStreams):
        asked = 0

        def spans(self) -> list[Span]:
            spans = super().spans()
            self.asked += bool(spans)
            # One pass warms up, then each repeat asks five times.
            slow = 2 <= self.asked < 7
            return [
                Span(s.stream, s.unit, 9 * s.start_ms, 9 * s.end_ms, s.at_pass) if slow else s
                for s in spans
            ]

    found = measure(Nothing(Sometimes(2, 1.0, 2.0, 0.0), 4), 4, repeats=3)
    assert found.repeats["compute"] == pytest.approx([9 * 8, 8, 8])
    assert found.repeats["serial"] == pytest.approx([9 * 12, 12, 12])
    assert found.overlapped_ms == pytest.approx(8)
    assert found.unit_compute_ms == pytest.approx([2] * 4)
    assert max(span.ms for span in found.serial + found.single) == pytest.approx(2)


@pytest.mark.parametrize("repeats", [1, 2, 3, 4])
def test_a_clock_that_gets_slower_makes_nothing_out_of_proportion(repeats: int) -> None:
    """Each kind of pass is a thousandth slower than the one before it."""

    class Tired(KnownStreams):
        asked = 0

        def spans(self) -> list[Span]:
            spans = super().spans()
            self.asked += bool(spans)
            f = 1.001**self.asked
            return [Span(s.stream, s.unit, f * s.start_ms, f * s.end_ms, s.at_pass) for s in spans]

    found = measure(Nothing(Tired(2, 1.0, 1.0, 0.0), 8), 8, repeats)
    assert found.share == pytest.approx(1.0, abs=0.0015)


def test_a_stream_alone_is_told_with_what_it_takes_between_two_units() -> None:
    """Overlapped it takes that, too."""

    class Gaps(KnownStreams):
        def _put(self, stream: Stream, unit: int, after: Mark | None, at_pass: int) -> At:
            self._free_ms[stream] += 0.25
            return super()._put(stream, unit, after, at_pass)

    found = measure(Nothing(Gaps(2, 1.0, 2.0, 0.0), 32), 32, 1)
    assert found.unit_compute_ms == [2.0] * 32
    assert found.compute_ms == pytest.approx(32 * 2.25 - 0.25)
    assert found.overlapped_ms == pytest.approx(32 * 2.25)
    assert found.share == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize("n_units", [1, 5])
def test_what_is_not_computed_is_not_measured(n_units: int) -> None:
    with pytest.raises(AssertionError):
        measure(Nothing(KnownStreams(2, 1, 1, 0), n_units, forgets=n_units - 1), n_units, 1)


WARM, CHECKED = 1, 3
"""Passes at first; then kinds of passes, of five, that have results, in each repeat."""


@pytest.mark.parametrize("right", range(WARM + 2 * CHECKED + 1))
def test_results_that_become_wrong_later_are_found(right: int) -> None:
    class Tiring(Nothing):
        poisoned = 0

        def poison(self) -> None:
            super().poison()
            self.poisoned += 1
            self._forgets = 2 if self.poisoned > right else None

    all_right = right == WARM + 2 * CHECKED
    with nullcontext() if all_right else pytest.raises(AssertionError):
        measure(Tiring(KnownStreams(2, 1, 1, 0), 3), 3, repeats=2)


# --- real layers of made-up numbers, on threads ---


@pytest.fixture
def host() -> Iterator[SyntheticHost]:
    with tempfile.TemporaryFile() as file:
        payload = SyntheticHost(file, Synthetic(5, 64 * KIB, 3), slots=3)
        yield payload
        payload.close()


def test_layers_from_a_file_are_computed_right(host: SyntheticHost) -> None:
    found = [measure(host, 5, repeats=2) for _ in range(5)]
    for each in found:
        assert min(each.unit_transfer_ms + each.unit_compute_ms) > 0
        assert each.serial_ms > sum(span.ms for span in each.serial) * 0.99
        assert each.share > 0
    host.iterate(40)
    slower = [measure(host, 5, repeats=2).compute_ms for _ in range(5)]
    # The quickest of several: others may have had the processor for a while.
    assert min(slower) > min(each.compute_ms for each in found)


def test_poison_stays_where_nothing_is_computed(host: SyntheticHost) -> None:
    Rounds(host, 5).serial()
    host.check()
    host.poison()
    with pytest.raises(DataLoss, match="unit 0"):
        host.check()
    Rounds(host, 4).serial()
    with pytest.raises(DataLoss, match="unit 4"):
        host.check()


def test_the_bytes_of_another_layer_are_found() -> None:
    class Mixed(SyntheticHost):
        def _copy(self, unit: int, slot: NDArray[np.uint8]) -> None:
            super()._copy(3 if unit == 2 else unit, slot)

    with tempfile.TemporaryFile() as file:
        payload = Mixed(file, Synthetic(5, 64 * KIB, 3), slots=2)
        with pytest.raises(DataLoss, match="unit 2"):
            measure(payload, 5, repeats=1)
        payload.close()
