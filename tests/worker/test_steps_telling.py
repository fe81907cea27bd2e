"""How often a lane that goes on by itself tells of its tokens: errands over a fake pool, on a clock
that stands still but for what decoding takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
from core_driver import MS, Driver
from fake_engine import ModelSpec
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.finishing import Finishing, Result, Share
from vram_conductor.worker.job import Job
from vram_conductor.worker.lane import Errand
from vram_conductor.worker.steps import TELL_NS, Submission

TOKEN_MS = 2.5
"""What the fake engine takes for a batch of one token."""


class Takes:
    """Stands for what draws the conclusions."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends = 0

    def computed(self, pool: Any, shares: Sequence[Share], result: Result, *, last: bool) -> None:
        for token in result.tokens.values():
            assert isinstance(token, int)
            self.tokens.append(token)
        self.ends += last


def told(rounds: int, every_ms: float, *, started: bool) -> tuple[list[int], list[float]]:
    """How many tokens there were at each report, and when in ms; tokens take ``every_ms``."""
    driver = Driver([ModelSpec("full")])
    driver.load("full", "full", n_ctx=200)
    op = driver.run("full", prompt="abc", max_tokens=100)
    while not driver.attempts[op].ids:
        driver.step()
    (job,) = cast("list[Job]", list(driver.core.jobs))
    assert job.pool is not None
    spent, takes = driver.device, Takes()
    driver.engine.faults.decode = lambda batch: spent.spend(every_ms - TOKEN_MS)
    if not started:
        job.generated = 0
    begin_ns = spent.now_ns
    errand = Submission(
        job.pool, [(job, 1)], rounds, spent.clock, cast("Finishing", takes), begin_ns
    )
    counts: list[int] = []
    times: list[float] = []

    def report(reported: Errand) -> None:
        reported.finish(over=reported.over)
        counts.append(len(takes.tokens))
        times.append((spent.now_ns - begin_ns) / MS)

    errand.carry_out(report)
    assert errand.error is None, errand.error
    assert takes.ends == 1
    return counts, times


def test_the_first_token_of_an_answer_is_told_at_once() -> None:
    counts, _ = told(8, TOKEN_MS, started=False)
    assert counts[0] == 1


@pytest.mark.parametrize("started", [True, False])
@given(st.integers(1, 16), st.sampled_from([TOKEN_MS, 3.0, 10.0]))
def test_slow_tokens_are_told_one_by_one(started: bool, rounds: int, every_ms: float) -> None:
    counts, _ = told(rounds, every_ms, started=started)
    assert counts == list(range(1, len(counts) + 1))


@given(st.integers(1, 40), st.sampled_from([0.0, 0.25, 0.8, 1.2]), st.booleans())
def test_fast_tokens_are_told_together_but_none_much_later(
    rounds: int, every_ms: float, started: bool
) -> None:
    counts, times = told(rounds, every_ms, started=started)
    tokens = counts[-1]
    assert counts == sorted(set(counts)), "each report brings something"
    first = 0 if started else 1
    gaps = [after - before for before, after in pairwise(times[first:])][:-1]
    assert all(gap >= TELL_NS / MS for gap in gaps), times
    # Nothing waits for longer than that and the token under way.
    assert all(gap <= TELL_NS / MS + every_ms for gap in gaps), times
    if every_ms * tokens < TELL_NS / MS:
        assert len(counts) <= first + 1, counts
