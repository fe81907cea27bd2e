"""The GPU's streams: every computation sees its own unit, whatever order the device works in."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from cuda_on_cpu.device import EmulatedCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_rig import Rig

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.worker.pipeline.stream_cuda import CudaStreams

NOWHERE = Path("/nonexistent")
"""No test here compiles a kernel."""


@contextmanager
def rig(
    n_units: int, slots: int, seed: int = 0, *, timed: bool = False
) -> Generator[tuple[EmulatedCuda, Rig]]:
    gpu = EmulatedCuda(NOWHERE, seed=seed)
    it = Rig(gpu, n_units, slots, timed=timed)
    try:
        yield gpu, it
    finally:
        it.close()
        gpu.close()


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 1000), st.booleans())
def test_a_computation_finds_its_own_unit(
    n_units: int, slots: int, passes: int, seed: int, timed: bool
) -> None:
    with rig(n_units, slots, seed, timed=timed) as (_, it):
        for _ in range(passes):
            it.pipeline.run(it.work)
        it.pipeline.synchronise()
        assert it.units == list(range(n_units)) * passes
        assert it.seen() == [unit + 1 for unit in it.units]


def test_serial_and_overlapped_passes_may_follow_each_other() -> None:
    with rig(4, 2) as (_, it):
        it.pipeline.run(it.work)
        it.pipeline.run_serial(it.work)
        it.pipeline.run(it.work, ahead=False)
        it.pipeline.synchronise()
        assert it.seen() == [1, 2, 3, 4] * 3


def test_spans_tell_every_unit_of_every_pass_in_order() -> None:
    with rig(3, 2, timed=True) as (_, it):
        for _ in range(2):
            it.pipeline.run(it.work, ahead=False)
        it.pipeline.synchronise()
        spans = it.streams.spans()
        for kind in ("transfer", "compute"):
            mine = [span for span in spans if span.stream == kind]
            assert [(span.at_pass, span.unit) for span in mine] == [
                (at_pass, unit) for at_pass in range(2) for unit in range(3)
            ]
            times = [at for span in mine for at in (span.start_ms, span.end_ms)]
            assert times == sorted(times)
            assert times[0] > 0
        ended = {(span.stream, span.at_pass, span.unit): span.end_ms for span in spans}
        for span in spans:
            if span.stream == "compute":
                assert span.start_ms >= ended["transfer", span.at_pass, span.unit]
        assert it.streams.spans() == []


@pytest.mark.parametrize("seed", range(5))
def test_the_last_computation_can_be_waited_for(seed: int) -> None:
    with rig(4, 2, seed) as (_, it):
        for passes in (1, 2):
            it.pipeline.wait(it.pipeline.run(it.work))
            assert it.seen() == [1, 2, 3, 4] * passes


def test_untimed_streams_tell_no_spans() -> None:
    with rig(3, 2) as (_, it):
        it.pipeline.run(it.work)
        it.pipeline.synchronise()
        assert it.streams.spans() == []


def test_what_is_done_is_waited_for_no_more() -> None:
    with rig(3, 2) as (_, it):
        mark: Any = it.pipeline.run(it.work)
        it.pipeline.synchronise()
        assert mark.end is None, "its event stands for something else soon"


def fail(unit: int, slot: Any) -> None:
    raise ValueError(f"unit {unit}")


@pytest.mark.parametrize("failing", [False, True])
def test_events_are_used_again(failing: bool) -> None:
    made = 0

    class Counting(EmulatedCuda):
        def event(self, timed: bool = False) -> Any:
            nonlocal made
            made += 1
            return super().event(timed)

    gpu = Counting(NOWHERE)
    it = Rig(gpu, 3, 2, timed=True)
    for _ in range(40 if failing else 8):
        it.units.clear()
        with pytest.raises(ValueError, match="unit 0") if failing else nullcontext():
            it.pipeline.run(fail if failing else it.work)
        it.pipeline.synchronise()
        it.streams.spans()
    # A clock, and two for each of at most three computations and five transfers of one pass.
    assert made <= 1 + 2 * (3 + 5)
    it.close()
    gpu.close()


@pytest.mark.parametrize("serial", [False, True])
def test_what_work_raises_comes_at_once_and_the_streams_go_on(serial: bool) -> None:
    # Nothing is done before somebody waits.
    with rig(3, 2, seed=1) as (_, it):

        def late(unit: int, slot: Any) -> None:
            it.work(unit, slot)
            fail(unit, slot)

        run = it.pipeline.run_serial if serial else it.pipeline.run
        with pytest.raises(ValueError, match="unit 0"):
            run(late)
        assert it.seen() == [1], "what was put before is under way, and its slot counts as free"
        run(it.work)
        it.pipeline.synchronise()
        assert it.seen() == [1, 1, 2, 3]


def test_a_device_without_streams_leaves_nothing_behind() -> None:
    class Failing(EmulatedCuda):
        def stream(self) -> Any:
            if self._streams:
                raise Internal("cuda_failed", "no more streams")
            return super().stream()

    gpu = Failing(NOWHERE)
    with pytest.raises(Internal, match="no more streams"):
        CudaStreams(gpu, gpu.pinned(1000), [(0, 1000)], 2, 1000)
    gpu.close()


def test_too_little_device_memory_leaves_nothing_behind() -> None:
    gpu = EmulatedCuda(NOWHERE, total_bytes=2 * 1000)
    payload = gpu.pinned(1000)
    with pytest.raises(ResourceExhausted) as caught:
        CudaStreams(gpu, payload, [(0, 1000)], 3, 1000)
    assert caught.value.details["need_bytes"] == 1000
    assert caught.value.details["free_bytes"] == 0
    gpu.close()


@pytest.mark.parametrize("forget", ["the transfer", "the computation"])
def test_the_emulated_device_shows_a_forgotten_wait(forget: str) -> None:
    def seen(seed: int) -> list[int]:
        with rig(4, 2, seed) as (_, it):
            put: Callable[..., Any] = (
                it.streams.compute if forget == "the transfer" else it.streams.transfer
            )

            def careless(unit: int, what: Any, after: Any, *, at_pass: int = 0) -> Any:
                return put(unit, what, None, at_pass=at_pass)

            name = "compute" if forget == "the transfer" else "transfer"
            setattr(it.streams, name, careless)
            for _ in range(2):
                it.pipeline.run(it.work)
            it.pipeline.synchronise()
            return it.seen()

    assert any(seen(seed) != [1, 2, 3, 4] * 2 for seed in range(20))
