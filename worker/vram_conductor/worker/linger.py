"""When weights that nobody uses leave the device (*pure*), as REGISTER's ``linger_s`` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.residency import Agent, Residency, Weights

SECOND_NS = 1_000_000_000


def longest(agents: Iterable[Agent]) -> dict[str, int | None]:
    """Model → the longest ``linger_s`` of its agents; None: one of them wants it to stay."""
    found: dict[str, int | None] = {}
    for agent in agents:
        so_far, one = found.get(agent.model, 0), agent.linger_s
        found[agent.model] = None if one is None or so_far is None else max(one, so_far)
    return found


def due_ns(weights: Weights, known: Mapping[str, int | None]) -> int | None:
    """When they should leave; None: not because of time.

    Args:
        known: ``longest`` of all agents. A model that is not in it has no agent left: its time
            counts from when the last one went.
    """
    if weights.handle is None or weights.readers:
        return None  # prompts are made with its vocabulary
    if weights.model not in known:
        return weights.leaves_ns
    linger_s = known[weights.model]
    return None if linger_s is None else weights.used_ns + linger_s * SECOND_NS


class Lingering:
    """Looks after the weights of one device."""

    def __init__(self, residency: Residency, jobs: Jobs) -> None:
        self._residency = residency
        self._jobs = jobs
        self._models: frozenset[str] | None = None
        self._known: dict[str, int | None] = {}

    def next_ns(self) -> int | None:
        """When the first ones should leave."""
        return min((at_ns for at_ns, _ in self._idle()), default=None)

    def overdue(self, now_ns: int) -> list[Weights]:
        """Those that should leave now."""
        return [weights for at_ns, weights in self._idle() if at_ns <= now_ns]

    def _idle(self) -> Iterator[tuple[int, Weights]]:
        """Weights that no job wants and that have a time, with that."""
        models = self._residency.owned_models()
        if models is not self._models:
            # The set is made anew whenever an agent comes or goes; there may be thousands.
            self._models, self._known = models, longest(self._residency.agents.values())
        timed = [(due_ns(item, self._known), item) for item in self._residency.weights.values()]
        if all(at_ns is None for at_ns, _ in timed):
            return
        busy = {job.pool.weights.model for job in self._jobs}
        for at_ns, item in timed:
            if at_ns is not None and item.model not in busy:
                yield at_ns, item
