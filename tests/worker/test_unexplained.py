"""Memory that nobody can account for: drift, leaks, and when a restart is the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.unexplained import (
    DRIFT_BYTES,
    RECYCLE_AGE_NS,
    RECYCLE_BYTES,
    RECYCLE_NS,
    Unexplained,
    Verdict,
    settle_scratch,
)

MIB, GIB = 1 << 20, 1 << 30
BASE = 600 * MIB


def test_a_little_becomes_part_of_the_base_once() -> None:
    """Kernels that a model of a new type brought: 2 MiB, then 4 more, then it is known."""
    watch = Unexplained(recycle_age_ns=0)
    base = BASE
    for told in (BASE, BASE + 2 * MIB, BASE + 6 * MIB, BASE + 6 * MIB):
        verdict = watch.observe(base, told, told, 0, idle=True)
        assert verdict.unexplained_bytes == 0
        base += verdict.drift_bytes
        assert base == told


def test_a_slow_leak_is_not_drift_for_ever() -> None:
    watch = Unexplained(recycle_age_ns=0)
    base = rest = 0
    for step in range(40):
        verdict = watch.observe(BASE + base, 0, BASE + step * MIB, step, idle=True)
        base += verdict.drift_bytes
        rest = verdict.unexplained_bytes
    assert base == DRIFT_BYTES
    assert rest == 39 * MIB - DRIFT_BYTES


def test_a_young_process_is_not_replaced_by_one_like_it() -> None:
    watch = Unexplained()
    for now_ns in (0, RECYCLE_NS, RECYCLE_AGE_NS - 1):
        assert not watch.observe(BASE, 0, 9 * GIB, now_ns, idle=True).recycle
    assert watch.observe(BASE, 0, 9 * GIB, RECYCLE_AGE_NS, idle=True).recycle


def test_counting_too_much_is_nobodys_fault() -> None:
    assert (
        Unexplained(recycle_age_ns=0).observe(2 * BASE, 2 * BASE, BASE, 0, idle=True) == Verdict()
    )


def test_what_lasts_while_nothing_runs_is_a_reason_to_start_over() -> None:
    """ "Unloaded", with gigabytes still on the card."""
    watch = Unexplained(recycle_age_ns=0)
    watch.observe(BASE, 0, BASE + DRIFT_BYTES, 0, idle=True)

    def lost(now_ns: int, *, idle: bool = True, rest: int = 2 * GIB) -> Verdict:
        told = BASE + DRIFT_BYTES + rest
        return watch.observe(BASE + DRIFT_BYTES, told, told, now_ns, idle=idle)

    assert lost(0) == Verdict(0, 2 * GIB, recycle=False)
    assert not lost(RECYCLE_NS - 1).recycle
    assert lost(RECYCLE_NS).recycle
    assert not lost(RECYCLE_NS + 1, idle=False).recycle, "a job has come"
    assert not lost(RECYCLE_NS + 2).recycle, "the time counts anew"
    assert not lost(3 * RECYCLE_NS, rest=RECYCLE_BYTES).recycle, "the driver was slow, it is gone"
    assert not lost(3 * RECYCLE_NS + 1).recycle


def test_without_nvmls_word_a_rest_shows_when_something_is_freed() -> None:
    watch = Unexplained(recycle_age_ns=0)

    def see(counted: int, used: int, now_ns: int) -> Verdict:
        return watch.observe(counted, used, None, now_ns, idle=True)

    foreign = 3 * GIB
    assert see(BASE, BASE + foreign, 0) == Verdict()
    assert see(BASE + 5 * GIB, BASE + 5 * GIB + foreign, 1) == Verdict()
    assert see(BASE, BASE + 4 * GIB + foreign, 2).unexplained_bytes == 4 * GIB
    assert see(BASE, BASE + 4 * GIB + foreign, 2 + RECYCLE_NS).recycle
    assert see(BASE, BASE + foreign, 3 + RECYCLE_NS) == Verdict(), "it came late, but it came"


def test_without_nvmls_word_others_may_come_and_go() -> None:
    watch = Unexplained(recycle_age_ns=0)
    for step, foreign in enumerate([0, 9 * GIB, 2 * GIB, 30 * GIB, 0]):
        used = BASE + foreign
        assert watch.observe(BASE, used, None, step * RECYCLE_NS, idle=True) == Verdict()
    # An unload beside a program that takes more than was freed: at most what was freed is doubted.
    watch.observe(BASE + GIB, BASE + GIB, None, 0, idle=True)
    doubted = watch.observe(BASE, BASE + 9 * GIB, None, 1, idle=True).unexplained_bytes
    assert doubted == GIB


@given(
    st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.booleans()), max_size=30),
    st.booleans(),
)
def test_verdicts_are_sane(samples: list[tuple[int, int, bool]], told: bool) -> None:
    watch = Unexplained(recycle_age_ns=0)
    drift = 0
    for step, (counted, used, idle) in enumerate(samples):
        counted, used = counted * 32 * MIB, used * 32 * MIB
        told_bytes = used if told else None
        verdict = watch.observe(counted, used, told_bytes, step * RECYCLE_NS, idle=idle)
        drift += verdict.drift_bytes
        assert 0 <= drift <= DRIFT_BYTES
        assert 0 <= verdict.unexplained_bytes <= max(0, used - counted)
        assert not told or verdict.drift_bytes >= 0 or used < counted
        assert not verdict.recycle or (idle and verdict.unexplained_bytes > RECYCLE_BYTES)


@pytest.mark.parametrize(
    ("measured", "counted"),
    [(12, 12), (10, 10), (14, 14), (60, 60), (3, 14), (-500, 14), (4000, 14)],
)
def test_a_measurement_of_scratch_is_believed_if_it_can_be_true(
    measured: int, counted: int
) -> None:
    """14 MiB were estimated; another program came or went while the others were taken."""
    assert settle_scratch(14 * MIB, measured * MIB) == counted * MIB
