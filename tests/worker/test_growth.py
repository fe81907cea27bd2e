"""What a process takes beside what is loaded into it: promised before it is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.growth import LATE_BYTES, STEP_BYTES, Growth
from vram_conductor.worker.unexplained import DRIFT_BYTES, Unexplained

MIB = 1 << 20
BASE = 600 * MIB
ROOM = DRIFT_BYTES + STEP_BYTES
"""What comes beyond it counts as others' use, from the sample that shows it on."""


@pytest.mark.parametrize(
    ("taken", "booked"), [(0, 16), (2, 16), (12, 16), (13, 17), (16, 20), (30, 34), (-2, 16)]
)
def test_a_step_is_always_kept(taken: int, booked: int) -> None:
    growth = Growth(BASE).grown(taken * MIB)
    assert growth.booked_bytes == BASE + booked * MIB
    assert growth.reserve_bytes == (booked - taken) * MIB


steps = st.lists(st.tuples(st.integers(0, STEP_BYTES), st.integers(0, 8), st.booleans()))


@given(steps, st.lists(st.integers(0, 400 * MIB), min_size=1, max_size=5))
def test_what_is_in_use_is_promised_at_any_moment(
    grows: list[tuple[int, int, bool]], loads: list[int]
) -> None:
    """Kernels come at most a step at a time between two samples, or within the allowance
    without any; models come and go meanwhile."""
    watch, growth = Unexplained(), Growth(BASE)
    real = seen = 0
    for now_ns, (size, load, sampled) in enumerate(grows):
        loaded = loads[load % len(loads)]
        unseen = real - seen + size
        if real + size > DRIFT_BYTES or (unseen > STEP_BYTES and real + size > LATE_BYTES):
            continue
        real += size
        told = BASE + real + loaded
        assert told <= growth.booked_bytes + loaded, "before any sample shows it"
        if sampled:
            counted = growth.used_bytes + loaded
            verdict = watch.observe(counted, told, told, now_ns, idle=False)
            growth, seen = growth.grown(verdict.drift_bytes), real
            assert verdict.unexplained_bytes == 0
            assert growth.used_bytes == BASE + real, "and the lines add up"
            assert growth.reserve_bytes >= STEP_BYTES
            assert growth.booked_bytes <= BASE + ROOM


@given(st.lists(st.integers(-DRIFT_BYTES, DRIFT_BYTES)))
def test_what_goes_again_is_promised_no_longer(changes: list[int]) -> None:
    growth = Growth(BASE)
    for change in changes:
        growth = growth.grown(change)
    back = growth.grown(-growth.taken_bytes)
    assert back == Growth(BASE)
    assert growth.booked_bytes >= max(BASE + LATE_BYTES, growth.used_bytes + STEP_BYTES)
