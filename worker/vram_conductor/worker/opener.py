"""Pools between closed, awake and asleep, and the bytes that they take. Their slots are empty."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.measured import check_measured
from vram_conductor.worker.residency import PoolState, Residency, Slot
from vram_conductor.worker.unexplained import settle_scratch

log = logging.getLogger(__name__)


class Opener:
    """The only one that opens and closes pools, puts them to sleep and wakes them."""

    def __init__(self, engine: Engine, residency: Residency, clock: Callable[[], int]) -> None:
        self._engine = engine
        self._residency = residency
        self._clock = clock

    def open(self, pool: PoolState) -> None:
        """Open a pool in its wanted shape; its weights are awake.

        Raises:
            ConductorError: ``pool_failed``, or code ``MEASURED``; it is closed then.
        """
        weights = pool.weights
        assert pool.handle is None
        assert weights.handle is not None
        assert weights.resident
        before = None if weights.scratch_measured else self._engine.used_bytes()
        begin = self._clock()
        pool.handle = weights.handle.open_pool(pool.want)
        pool.open_ms = (self._clock() - begin) / 1e6
        pool.slots = [Slot(index) for index in range(pool.want.slots)]
        promised, pool.open_bytes = pool.want_bytes, pool.handle.measured_bytes
        pool.want_bytes, pool.measured = pool.open_bytes, True
        pool.used_ns = self._clock()
        self._residency.rates.note("open_pool", pool.open_bytes, pool.open_ms)
        self._residency.revision += 1
        try:
            self._measure_scratch(pool, before)
            check_measured(self._residency, f"pool:{pool.key}", promised, pool.open_bytes)
        except ConductorError:
            self.close(pool)
            raise

    def _measure_scratch(self, pool: PoolState, before: int | None) -> None:
        """What the first live context of a model takes beyond its buffers, from what the device
        has in use before it was there and after it has computed once."""
        if before is None or pool.handle is None:
            return
        pool.handle.warm_up()
        after = self._engine.used_bytes()
        if after is not None:
            measured = max(0, after - before - pool.open_bytes)
            pool.weights.scratch_bytes = settle_scratch(pool.weights.scratch_bytes, measured)
            pool.weights.scratch_measured = True

    def close(self, pool: PoolState) -> None:
        """Close a pool, awake or asleep."""
        assert pool.handle is not None
        assert not any(slot.conversation for slot in pool.slots)
        pool.handle.close()
        pool.handle, pool.slots, pool.open_bytes, pool.stage_ns = None, [], 0, None
        pool.asleep = False
        self._residency.revision += 1

    def sleep(self, pool: PoolState) -> None:
        """Put a pool to sleep. One that refuses is closed."""
        assert pool.handle is not None
        assert not pool.asleep
        assert not any(slot.conversation for slot in pool.slots)
        begin = self._clock()
        try:
            pool.handle.sleep()
        except ConductorError as error:
            log.error("%s is closed instead: %s", pool.key, error.info.message)
            self.close(pool)
            return
        took_ms = (self._clock() - begin) / 1e6
        self._residency.rates.note("sleep_pool", pool.open_bytes, took_ms)
        pool.asleep, pool.stage_ns = True, None
        self._residency.revision += 1

    def wake(self, pool: PoolState) -> None:
        """Wake a pool; it is empty.

        Raises:
            ConductorError: ``wake_failed``: it sleeps on; where it is not retryable, the device
                itself has refused and the pool is closed.
        """
        assert pool.handle is not None
        assert pool.asleep
        begin = self._clock()
        try:
            pool.handle.wake()
        except ConductorError as error:
            if not error.retryable:
                self.close(pool)
            raise
        pool.asleep = False
        took_ms = (self._clock() - begin) / 1e6
        self._residency.rates.note("wake_pool", pool.open_bytes, took_ms)
        self._residency.revision += 1
