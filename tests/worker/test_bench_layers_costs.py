"""How long the rest of a bench is expected to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram_conductor.worker.bench.layers_costs import (
    COMPARISONS,
    LOGIT_S,
    POSITIONS_LEAST,
    Costs,
    cuts,
)


def test_nothing_is_expected_of_what_was_never_measured() -> None:
    costs = Costs(1000)
    assert costs.pass_s(512) == 0
    assert costs.prefill_s(512, 6) == 0
    assert costs.agreement_s(0, 32) == 0


def test_a_prompt_takes_what_its_passes_do() -> None:
    costs = Costs(1000)
    costs.add_pass(1, 0.5)
    assert costs.pass_s(512) == 0.5, "the same bytes travel"
    costs.add_pass(64, 2.0)
    assert costs.prefill_s(1, 4) == pytest.approx(3 * 4 * 0.5)
    assert costs.prefill_s(40, 4) == pytest.approx(3 * 4 * 2.0), "no more than 64 take"
    assert costs.prefill_s(64 + 63, 4) == pytest.approx(3 * 4 * 3.5), "another 1.5 s for 63"
    assert costs.row_s(40, 3) == pytest.approx(3 * 3 * 2.0)


def test_an_agreement_takes_two_texts_a_reply_and_comparing() -> None:
    costs = Costs(1000)
    costs.add_pass(1, 0.5)
    costs.add_pass(64, 2.0)
    assert costs.agreement_s(64, 32) == pytest.approx(
        2 * 2.0 + 32 * 0.5 + COMPARISONS * 64 * 1000 * LOGIT_S
    )


@given(st.dictionaries(st.integers(1, 600), st.floats(1e-4, 10), min_size=1), st.integers(1, 2000))
def test_more_tokens_are_not_expected_to_take_less(measured: dict[int, float], tokens: int) -> None:
    costs = Costs(1)
    for count, seconds in measured.items():
        costs.add_pass(count, seconds)
    assert costs.pass_s(tokens) > 0
    if tokens < max(measured):
        assert costs.pass_s(tokens) <= costs.pass_s(tokens + 1)


def test_an_agreement_is_cut_by_halves() -> None:
    assert list(cuts(256, 32)) == [(256, 32), (128, 16), (64, 8), (32, 4), (16, 2)]
    assert list(cuts(POSITIONS_LEAST - 1, 3)) == [(POSITIONS_LEAST - 1, 3)]
    assert list(cuts(2 * POSITIONS_LEAST + 1, 1))[-1] == (POSITIONS_LEAST, 1)
