"""Turns: rank, aging, time slices."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.schedule import (
    AGING_NS,
    JobView,
    StageView,
    frozen_jobs,
    frozen_pools,
    rank,
    ranked,
    stay_ns,
)

MS = 1_000_000
FLOOR = 100 * MS


def job(seq: int, pool: str = "p", **fields: object) -> JobView:
    return replace(JobView(seq, pool, 0, 0), **fields)  # type: ignore[arg-type]


def test_priority_goes_first_then_the_longest_wait_then_arrival() -> None:
    jobs = [
        job(1, waiting_ns=50),
        job(2, waiting_ns=10),
        job(3, priority=1, waiting_ns=90),
        job(4, waiting_ns=10),
        job(5, placed_ns=1),
    ]
    assert [item.seq for item in ranked(jobs, 100)] == [3, 2, 4, 1]


def test_who_lost_a_slot_to_a_reopening_comes_back_first() -> None:
    jobs = [job(1, priority=9), job(2, front=True)]
    assert [item.seq for item in ranked(jobs, 0)] == [2, 1]


def test_aging_lifts_a_level_per_period() -> None:
    old, new = job(1), job(2, priority=2, waiting_ns=3 * AGING_NS)
    assert rank(old, 3 * AGING_NS) == 3
    assert [item.seq for item in ranked([old, new], 3 * AGING_NS)] == [1, 2]


@given(swap_ms=st.floats(0, 10_000))
def test_swaps_take_a_tenth_of_the_time_at_most(swap_ms: float) -> None:
    for urgent in (False, True):
        stay = stay_ns(swap_ms, floor_ns=FLOOR, urgent=urgent)
        assert swap_ms * MS <= 0.1 * (swap_ms * MS + stay) + 10
    assert stay_ns(swap_ms, floor_ns=FLOOR, urgent=False) >= FLOOR


def test_a_pool_is_frozen_for_its_slice_and_while_its_priority_is_higher() -> None:
    waiter = job(9, "q", waiting_ns=0)
    running = job(1, placed_ns=0)
    stages = {"p": StageView("p", 0, 0.0)}

    def frozen(now_ns: int, *jobs: JobView, who: JobView = waiter) -> bool:
        return "p" in frozen_pools(who, [who, *jobs], stages, now_ns, FLOOR)

    assert frozen(FLOOR - 1, running)
    assert not frozen(FLOOR, running)
    assert not frozen(FLOOR - 1)
    assert frozen(FLOOR, replace(running, priority=1))
    assert not frozen(AGING_NS, replace(running, priority=1))
    # Waiting jobs hold a pool just as running ones do: joining costs no swap.
    assert frozen(FLOOR - 1, job(2))
    # Higher priority waits only for what the swap costs.
    urgent = replace(waiter, priority=1)
    assert not frozen(1, running, who=urgent)
    stages["p"] = StageView("p", 0, 5.0)
    assert frozen(45 * MS - 1, running, who=urgent)
    assert not frozen(45 * MS, running, who=urgent)
    # What got nowhere yet is left alone by anybody.
    assert frozen(AGING_NS, replace(running, settling=True), who=urgent)


def test_jobs_of_one_pool_take_turns_in_its_slots() -> None:
    waiter = job(9)
    running = [job(1, placed_ns=0), job(2, placed_ns=60 * MS), job(3, "q", placed_ns=0)]
    views = [waiter, *running]
    assert frozen_jobs(waiter, views, 0.0, 99 * MS, FLOOR) == {1, 2}
    assert frozen_jobs(waiter, views, 0.0, 100 * MS, FLOOR) == {2}
    assert frozen_jobs(waiter, views, 0.0, 160 * MS, FLOOR) == set()
    settling = [waiter, replace(running[0], settling=True)]
    assert frozen_jobs(waiter, settling, 0.0, 160 * MS, FLOOR) == {1}
