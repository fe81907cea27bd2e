"""The order of transfers and computations: properties over random passes, and what it is worth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_simulation import simulate

from vram_conductor.worker.pipeline.schedule import (
    Schedule,
    Step,
    bound,
    makespan_ms,
    single_pass_ms,
)
from vram_conductor.worker.pipeline.streams import Span

TIMES = st.floats(0.0, 100.0, allow_nan=False)


@dataclass(frozen=True)
class Case:
    n_units: int
    slots: int
    resident: frozenset[int]
    aheads: tuple[bool, ...]
    transfer_ms: tuple[float, ...]
    compute_ms: tuple[float, ...]

    @property
    def streamed(self) -> list[int]:
        return [unit for unit in range(self.n_units) if unit not in self.resident]

    def passes(self) -> list[list[Step]]:
        schedule = Schedule(self.n_units, self.slots, self.resident)
        return [schedule.next_pass(ahead) for ahead in self.aheads]

    def steps(self) -> list[Step]:
        return [step for steps in self.passes() for step in steps]

    def simulated(self) -> list[Span]:
        return simulate(self.steps(), self.transfer_ms, self.compute_ms)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_units = draw(st.integers(1, 9))
    times = st.lists(TIMES, min_size=n_units, max_size=n_units).map(tuple)
    return Case(
        n_units,
        draw(st.integers(1, 4)),
        draw(st.frozensets(st.integers(0, n_units - 1))),
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=4))),
        draw(times),
        draw(times),
    )


def of(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if step.kind == kind]


@given(cases())
def test_every_pass_computes_all_units_in_order(case: Case) -> None:
    for at_pass, steps in enumerate(case.passes()):
        computed = of(steps, "compute")
        assert [step.unit for step in computed] == list(range(case.n_units))
        assert {step.at_pass for step in computed} == {at_pass}


@given(cases())
def test_resident_units_never_travel_and_the_others_once_per_pass(case: Case) -> None:
    travelled = [(step.at_pass, step.unit) for step in of(case.steps(), "transfer")]
    passes = len(case.aheads)
    expected = [(at, unit) for at in range(passes) for unit in case.streamed]
    assert travelled[: len(expected)] == expected
    # What is ahead of the last pass goes on in the same order.
    ahead = travelled[len(expected) :]
    cycle = [(passes + at, unit) for at in range(case.slots) for unit in case.streamed]
    assert ahead == cycle[: len(ahead)]


@given(cases())
def test_each_computation_finds_its_own_unit(case: Case) -> None:
    inside: dict[int, tuple[int, int]] = {}
    for step in case.steps():
        if step.kind == "transfer":
            assert step.slot is not None
            assert 0 <= step.slot < case.slots
            inside[step.slot] = (step.at_pass, step.unit)
        elif step.unit in case.resident:
            assert step.slot is None
        else:
            assert step.slot is not None
            assert inside.pop(step.slot) == (step.at_pass, step.unit)


@given(cases())
def test_no_slot_is_overwritten_before_it_was_read(case: Case) -> None:
    """Whatever everything takes: in a slot, transfer and computation take turns, without overlap.

    The simulation waits for what was put on a stream before; a transfer put too early would not
    wait for the computation that it must not overtake.
    """
    in_slot: dict[int, list[tuple[Step, Span]]] = {}
    for step, span in zip(case.steps(), case.simulated(), strict=True):
        if step.slot is not None:
            in_slot.setdefault(step.slot, []).append((step, span))
    for pairs in in_slot.values():
        assert [step.kind for step, _ in pairs] == [
            "compute" if at % 2 else "transfer" for at in range(len(pairs))
        ]
        for (_, before), (_, after) in itertools.pairwise(pairs):
            assert after.start_ms >= before.end_ms


@given(cases())
def test_as_much_travels_ahead_as_there_is_room(case: Case) -> None:
    waiting = 0
    for steps, ahead in zip(case.passes(), case.aheads, strict=True):
        for at, step in enumerate(steps):
            waiting += {"transfer": 1, "compute": 0 if step.slot is None else -1}[step.kind]
            assert 0 <= waiting <= case.slots
            free = step.kind == "transfer" and waiting < case.slots
            if free and of(steps[at + 1 :], "transfer"):
                assert steps[at + 1].kind == "transfer", "a free slot is filled at once"
        if ahead and case.streamed:
            assert waiting == case.slots
        elif case.slots <= len(case.streamed):
            assert waiting == 0
        if not ahead:
            at_pass = steps[-1].at_pass
            assert all(step.at_pass <= at_pass for step in steps), "nothing is begun for later"


@given(cases())
def test_no_overlap_beats_the_longer_stream_or_loses_to_the_serial_schedule(case: Case) -> None:
    steps, spans = case.steps(), case.simulated()
    transfer_ms = sum(case.transfer_ms[step.unit] for step in of(steps, "transfer"))
    compute_ms = sum(case.compute_ms) * len(case.aheads)
    took_ms = makespan_ms(spans)
    rounding = 1e-9 * (transfer_ms + compute_ms)
    assert took_ms >= max(transfer_ms, compute_ms) - rounding
    assert took_ms <= transfer_ms + compute_ms + rounding
    assert [span.ms for span in spans] == pytest.approx(
        [(case.transfer_ms if s.kind == "transfer" else case.compute_ms)[s.unit] for s in steps],
        abs=1e-9,
    )


@given(cases())
def test_no_single_pass_beats_its_optimum(case: Case) -> None:
    steps = Schedule(case.n_units, case.slots, case.resident).next_pass(ahead=False)
    took_ms = makespan_ms(simulate(steps, case.transfer_ms, case.compute_ms))
    travelling = [0.0 if u in case.resident else t for u, t in enumerate(case.transfer_ms)]
    optimum_ms = single_pass_ms(travelling, case.compute_ms)
    if case.streamed and case.streamed[0] == 0:
        assert took_ms >= optimum_ms - 1e-9
    unlimited = Schedule(case.n_units, case.n_units, case.resident).next_pass(ahead=False)
    best_ms = max(
        span.end_ms
        for span in simulate(unlimited, case.transfer_ms, case.compute_ms)
        if span.stream == "compute"
    )
    assert best_ms == pytest.approx(optimum_ms), "with a slot for each unit it is reached"


@given(st.integers(1, 9), st.integers(2, 4), st.integers(0, 50), st.integers(0, 50))
def test_like_units_reach_the_bound_with_two_slots(n: int, slots: int, t: int, c: int) -> None:
    """Passes back to back take ``n * max(t, c)`` each, the first one its fill more; one pass
    alone is as short as can be."""
    schedule = Schedule(n, slots)
    first = schedule.next_pass(ahead=False)
    single = makespan_ms(simulate(first, [t] * n, [c] * n))
    assert single == (n - 1) * max(t, c) + t + c == single_pass_ms([t] * n, [c] * n)
    schedule.restart()
    passes = 5
    steps = [step for _ in range(passes) for step in schedule.next_pass()]
    spans = simulate(steps, [t] * n, [c] * n)
    computed = [span for span in spans if span.stream == "compute"]
    ends = [max(span.end_ms for span in computed if span.at_pass == at) for at in (0, passes - 1)]
    assert ends[1] - ends[0] == (passes - 1) * n * max(t, c)


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_one_unit_alone_still_travels_while_it_computes(slots: int) -> None:
    schedule = Schedule(1, slots)
    first, second = schedule.next_pass(), schedule.next_pass()
    assert [(step.kind, step.slot, step.at_pass) for step in first] == [
        *[("transfer", slot, slot) for slot in range(slots)],
        ("compute", 0, 0),
        ("transfer", 0, slots),
    ]
    assert [(step.kind, step.slot, step.at_pass) for step in second] == [
        ("compute", 1, 1),
        ("transfer", 1, slots + 1),
    ]


def test_where_all_is_resident_nothing_travels() -> None:
    steps = Schedule(3, 2, resident=range(3)).next_pass()
    assert steps == [Step("compute", unit, None, 0) for unit in range(3)]


@given(cases())
def test_the_serial_pass_takes_one_after_the_other(case: Case) -> None:
    schedule = Schedule(case.n_units, case.slots, case.resident)
    for at_pass in range(2):
        steps = schedule.serial_pass()
        expected: list[tuple[str, int]] = []
        for unit in range(case.n_units):
            expected += [("transfer", unit)] if unit not in case.resident else []
            expected += [("compute", unit)]
        assert [(step.kind, step.unit) for step in steps] == expected
        assert {step.at_pass for step in steps} == {at_pass}
        slots = [step.slot for step in steps if step.unit not in case.resident]
        assert slots[::2] == slots[1::2], "it is computed where it was put"


def test_restart_forgets_what_is_ahead() -> None:
    schedule = Schedule(3, 2)
    first = schedule.next_pass()
    assert schedule.next_pass() != first
    schedule.restart()
    assert schedule.next_pass() == first


def test_bounds_in_numbers() -> None:
    assert bound(3.0, 3.0) == 2.0
    assert bound(1.0, 4.0) == bound(4.0, 1.0) == 1.25
    assert bound(0.0, 0.0) == 1.0
    assert single_pass_ms([2.0] * 4, [3.0] * 4) == 2.0 + 4 * 3.0
    assert single_pass_ms([3.0] * 4, [2.0] * 4) == 4 * 3.0 + 2.0
    assert single_pass_ms([1.0, 9.0], [5.0, 1.0]) == 11.0
    assert makespan_ms([]) == 0.0
