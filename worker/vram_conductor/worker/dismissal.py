"""What no agent is left for goes: at once, after a while, or when nobody has claimed it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vram_conductor.worker.job import Receipt
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.linger import SECOND_NS, Lingering
from vram_conductor.worker.mover import Mover
from vram_conductor.worker.residency import PoolState, Residency, Weights

UNCLAIMED_NS = 60_000_000_000
"""How long what a former broker had loaded waits to be claimed by LOAD."""

log = logging.getLogger(__name__)


class Dismissal:
    """Frees pools and weights that nobody has a use for."""

    def __init__(
        self, residency: Residency, jobs: Jobs, mover: Mover, clock: Callable[[], int]
    ) -> None:
        self._residency = residency
        self._mover = mover
        self._clock = clock
        self._lingering = Lingering(residency, jobs)
        self._sweep_ns: int | None = None

    def drop_unowned(self, pool: PoolState, linger_s: int = 0) -> None:
        """Free what no agent is left for; weights that are loaded may stay for ``linger_s``."""
        residency = self._residency
        if pool.key not in residency.owned_pools():
            self._mover.close_pool(pool, Receipt())
            residency.pools.pop(pool.key, None)
        weights = pool.weights
        if weights.model not in residency.owned_models():
            for key in [key for key, item in residency.pools.items() if item.weights is weights]:
                self._mover.close_pool(residency.pools.pop(key), Receipt())
            if linger_s and weights.handle is not None:
                weights.leaves_ns = self._clock() + linger_s * SECOND_NS
            else:
                self.drop_weights(weights)
        residency.revision += 1

    def drop_weights(self, weights: Weights) -> None:
        """Free weights, as soon as nobody reads their vocabulary."""
        weights.doomed = weights.readers > 0
        if not weights.doomed:
            self._mover.unload(weights, Receipt())
            self._residency.weights.pop(weights.model, None)

    def disown_all(self, now_ns: int) -> None:
        """A new broker: it will load its agents again; what they had stays where it is."""
        for key in list(self._residency.agents):
            self._residency.dismiss(key)
        self._residency.revision += 1
        self._sweep_ns = now_ns + UNCLAIMED_NS

    def next_ns(self) -> int | None:
        """When :meth:`tidy` has something to do."""
        times = (self._sweep_ns, self._lingering.next_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

    def tidy(self, now_ns: int) -> None:
        """Free what nobody has claimed, and weights that nobody has used for as long as their
        agents asked for: those that have agents come back at their next job. Not while anything
        is hauled."""
        if self._sweep_ns is not None and now_ns >= self._sweep_ns:
            self._sweep_ns = None
            self._sweep()
        residency = self._residency
        for weights in self._lingering.overdue(now_ns):
            self._mover.unload(weights, Receipt())
            residency.lingered += 1
            residency.revision += 1
            log.info("%s left the device: it was not used for long enough", weights.path)
        for weights in list(residency.weights.values()):
            # Also what had to go earlier, because its room was needed.
            if weights.leaves_ns is not None and weights.handle is None and not weights.readers:
                residency.weights.pop(weights.model)

    def _sweep(self) -> None:
        owned = self._residency.owned_pools()
        for pool in list(self._residency.pools.values()):
            if pool.key not in owned:
                self.drop_unowned(pool)
