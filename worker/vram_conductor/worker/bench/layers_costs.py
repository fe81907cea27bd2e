"""How long what is still to be measured will take, by what was. *Pure.*"""

from __future__ import annotations

from collections.abc import Iterator

LOGIT_S = 2e-8
"""Comparing one logit with another, in NumPy's float64."""

COMPARISONS = 3
"""Of the logits: with those of the file, of its copy, and without a layer."""

PASSES = 2
"""Over the text: with all layers, and without one."""

WAYS = 3
"""Passes of a prefill's round: serial, from empty slots, overlapped; a batch's steps likewise: the
best tokens, all logits, serial."""

MARGIN = 1.5
"""What is still to come may take longer by so much."""

CHECK_SHARE = 0.5
"""Of all the time, at most, for the prefill and the logits beside llama.cpp's."""


POSITIONS_LEAST = 16
"""Fewer say little of how far two engines' logits lie apart."""


def cuts(positions: int, greedy: int) -> Iterator[tuple[int, int]]:
    """All of the positions and greedy tokens, half of both, and so on."""
    yield positions, greedy
    while positions >= 2 * POSITIONS_LEAST:
        positions, greedy = positions // 2, -(-greedy // 2)
        yield positions, greedy


class Costs:
    """Seconds.

    Args:
        n_vocab: of the model.

    Attributes:
        open_s: of the engine that was opened last: the first one's kernels may have to be compiled.
    """

    def __init__(self, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._passes: dict[int, float] = {}
        self.open_s = 0.0

    def add_pass(self, tokens: int, seconds: float) -> None:
        """A pass of so many tokens was measured."""
        self._passes[tokens] = seconds

    def pass_s(self, tokens: int) -> float:
        """Of so many tokens: no more than one of more of them took; of more than any on the line
        through the fewest and the most, since what travels is the same for all. 0 if none was
        measured."""
        if not self._passes:
            return 0.0
        larger = [took for measured, took in self._passes.items() if measured >= tokens]
        if larger:
            return min(larger)
        least, most = min(self._passes), max(self._passes)
        slope = (self._passes[most] - self._passes[least]) / max(1, most - least)
        return self._passes[most] + max(0.0, slope) * (tokens - most)

    def row_s(self, batch: int, steps: int) -> float:
        """Of a batch that decodes so many steps in all ways."""
        return WAYS * steps * self.pass_s(batch)

    def prefill_s(self, tokens: int, rounds: int) -> float:
        """Of a prompt of so many tokens, ``rounds`` times in all ways."""
        return WAYS * rounds * self.pass_s(tokens)

    def agreement_s(self, positions: int, greedy: int) -> float:
        """Of the logits at so many positions, and so many tokens one after the other."""
        comparing = COMPARISONS * positions * self._n_vocab * LOGIT_S
        return PASSES * self.pass_s(positions) + greedy * self.pass_s(1) + comparing
