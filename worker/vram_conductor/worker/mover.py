"""Carries out the planner's moves on engine and store, and measures them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.job import Receipt
from vram_conductor.worker.loader import Loader
from vram_conductor.worker.measured import check_measured
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import PoolState, Residency, Slot, Weights
from vram_conductor.worker.store import Store
from vram_conductor.worker.world import (
    BackUp,
    ClosePool,
    Drop,
    LoadWeights,
    Move,
    OpenPool,
    Park,
    SleepPool,
    SleepWeights,
    UnloadWeights,
    WakePool,
    WakeWeights,
)

log = logging.getLogger(__name__)


class Mover:
    """The only one that opens, closes, loads and unloads, puts to sleep and wakes.

    Attributes:
        swaps: how often a conversation's KV left its slot or came back.
        switches: how often pools or weights had to go for something else.
    """

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        parking: Parking,
        store: Store,
        clock: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._residency = residency
        self._parking = parking
        self._clock = clock
        self._loader = Loader(engine, residency, store, clock)
        self.swaps = 0
        self.switches = 0

    @property
    def loading(self) -> bool:
        """Weights are being loaded, which may take long and counts no steps."""
        return self._loader.loading

    def carry_out(
        self,
        moves: Sequence[Move],
        receipt: Receipt,
        *,
        reopen: str = "",
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Do ``moves`` in order.

        ``reopen``: the pool that is closed only to be opened again; its jobs come back first.
        ``meanwhile``: called once, after all moves but weights that may still be waking: KV needs
        only its pool to be put back, and both come over the bus at the same time. Its own time is
        not counted as the moves'.

        Raises:
            ConductorError: ``load_failed``, ``pool_failed``, ``wake_failed`` (see
                ``loader.waits``), ``sleep_failed``, or the ledger's refusal with code
                ``MEASURED``. What was done before it stays done and is consistent.
        """
        begin, elsewhere_ns = self._clock(), 0
        gone = (ClosePool, UnloadWeights, SleepPool, SleepWeights)
        if any(isinstance(move, gone) and move != ClosePool(reopen) for move in moves):
            self.switches += 1
        try:
            for move in moves:
                self._do(move, receipt, reopen)
            if meanwhile is not None:
                before = self._clock()
                meanwhile()
                elsewhere_ns = self._clock() - before
        finally:
            try:
                self._loader.join()
            finally:
                receipt.moved_ms += (self._clock() - begin - elsewhere_ns) / 1e6

    def _do(self, move: Move, receipt: Receipt, reopen: str) -> None:
        pools, weights = self._residency.pools, self._residency.weights
        match move:
            case Park(key, index) | Drop(key, index):
                pool = pools[key]
                self.empty(pool, pool.slots[index], receipt, front=key == reopen)
            case SleepPool(key):
                self.sleep_pool(pools[key], receipt)
            case WakePool(key):
                self.wake_pool(pools[key])
            case ClosePool(key):
                self.close_pool(pools[key], receipt)
            case OpenPool(key):
                self.open_pool(pools[key])
            case SleepWeights(model):
                self.sleep(weights[model], receipt)
            case WakeWeights(model):
                self._loader.start_wake(weights[model])
            case UnloadWeights(model):
                self.unload(weights[model], receipt)
            case LoadWeights(model):
                self.load(weights[model])
            case BackUp(model):
                self._loader.back_up(weights[model])

    def empty(self, pool: PoolState, slot: Slot, receipt: Receipt, *, front: bool = False) -> None:
        """Take a conversation out of its slot, parking it if the store lacks its state; a job
        that runs there waits again."""
        if slot.conversation is None:
            return
        receipt.moved_bytes += self._parking.park(pool, slot)
        name = str(slot.conversation.key)
        if slot.job is not None:
            slot.job.leave_slot(self._clock(), front=front)
        if name not in receipt.evicted:
            receipt.evicted.append(name)
        self._parking.release(pool, slot)
        self.swaps += 1
        self._residency.revision += 1

    # --- pools --------------------------------------------------------------------------------

    def close_pool(self, pool: PoolState, receipt: Receipt) -> None:
        """Close a pool, awake or asleep; what is still in its slots is parked."""
        if pool.handle is None:
            return
        for slot in pool.slots:
            self.empty(pool, slot, receipt)
        pool.handle.close()
        pool.handle, pool.slots, pool.open_bytes, pool.stage_ns = None, [], 0, None
        pool.asleep = False
        receipt.evicted.append(f"pool:{pool.key}")
        self._residency.revision += 1

    def open_pool(self, pool: PoolState) -> None:
        """Open a pool in its wanted shape.

        Raises:
            ConductorError: ``pool_failed``, or code ``MEASURED``; it is closed then.
        """
        assert pool.handle is None
        self._loader.join()
        weights = pool.weights
        assert weights.handle is not None
        assert weights.resident
        before = None if weights.scratch_measured else self._engine.used_bytes()
        begin = self._clock()
        pool.handle = weights.handle.open_pool(pool.want)
        pool.open_ms = (self._clock() - begin) / 1e6
        pool.slots = [Slot(index) for index in range(pool.want.slots)]
        promised, pool.open_bytes = pool.want_bytes, pool.handle.measured_bytes
        pool.want_bytes, pool.measured = pool.open_bytes, True
        self._residency.rates.note("open_pool", pool.open_bytes, pool.open_ms)
        pool.used_ns = self._clock()
        self._residency.revision += 1
        try:
            self._measure_scratch(pool, before)
            check_measured(self._residency, f"pool:{pool.key}", promised, pool.open_bytes)
        except ConductorError:
            self.close_pool(pool, Receipt())
            raise

    def _measure_scratch(self, pool: PoolState, before: int | None) -> None:
        """What the first live context of a model takes beyond its buffers, from what the device
        has in use before and after it has computed once."""
        if before is None or pool.handle is None:
            return
        pool.handle.warm_up()
        after = self._engine.used_bytes()
        if after is not None:
            measured = max(0, after - before - pool.open_bytes)
            pool.weights.scratch_bytes = max(pool.weights.scratch_bytes, measured)
            pool.weights.scratch_measured = True

    def sleep_pool(self, pool: PoolState, receipt: Receipt) -> None:
        """Put a pool to sleep; what is still in its slots is parked. One that refuses is closed."""
        assert pool.handle is not None
        assert not pool.asleep
        for slot in pool.slots:
            self.empty(pool, slot, receipt)
        begin = self._clock()
        try:
            pool.handle.sleep()
        except ConductorError as error:
            log.error("%s is closed instead: %s", pool.key, error.info.message)
            self.close_pool(pool, receipt)
            return
        took_ms = (self._clock() - begin) / 1e6
        self._residency.rates.note("sleep_pool", pool.open_bytes, took_ms)
        pool.asleep, pool.stage_ns = True, None
        receipt.evicted.append(f"pool:{pool.key}")
        self._residency.revision += 1

    def wake_pool(self, pool: PoolState) -> None:
        """Wake a pool; it is empty.

        Raises:
            ConductorError: ``wake_failed``: it sleeps on; or, where the device itself refused, it
                is closed.
        """
        assert pool.handle is not None
        assert pool.asleep
        begin = self._clock()
        try:
            pool.handle.wake()
        except ConductorError as error:
            if not error.retryable:
                self.close_pool(pool, Receipt())
            raise
        pool.asleep, pool.used_ns = False, self._clock()
        self._residency.rates.note("wake_pool", pool.open_bytes, (pool.used_ns - begin) / 1e6)
        self._residency.revision += 1

    # --- weights ------------------------------------------------------------------------------

    def load(self, weights: Weights) -> None:
        """Load a model, and back it up where there is room for that: now, because later it would
        be in a user's turn.

        Raises:
            ConductorError: ``load_failed``, or code ``MEASURED``; nothing is loaded then.
        """
        if weights.handle is not None:
            return
        promised = weights.bytes
        self._loader.load(weights)
        try:
            check_measured(self._residency, f"weights:{weights.model}", promised, weights.bytes)
        except ConductorError:
            self.unload(weights, Receipt())
            raise
        if weights.model in self._loader.plan_backups().add:
            self._loader.back_up(weights)

    def unload(self, weights: Weights, receipt: Receipt) -> None:
        """Free a model's weights; its pools are closed first. Nobody may be reading them."""
        assert weights.readers == 0
        for pool in self._residency.pools.values():
            if pool.weights is weights:
                self.close_pool(pool, receipt)
        if weights.handle is not None:
            self._loader.free(weights)
            receipt.evicted.append(f"weights:{weights.model}")

    def sleep(self, weights: Weights, receipt: Receipt) -> None:
        """Put weights to sleep; their pools stay. Those that refuse are unloaded.

        Raises:
            ConductorError: ``sleep_failed``: somebody reads them, so that not even that can be.
        """
        try:
            self._loader.sleep(weights)
        except ConductorError as error:
            if weights.readers:
                raise
            log.error("%s is unloaded instead: %s", weights.path, error.info.message)
            self.unload(weights, receipt)
            return
        receipt.evicted.append(f"weights:{weights.model}")

    def keep_promises(self) -> None:
        """Give back what backups take of the room that was promised to parked states: the least
        recently used ones go, and weights that sleep are unloaded with them."""
        for model in self._loader.plan_backups().drop:
            weights = self._residency.weights[model]
            if weights.asleep:
                self.unload(weights, Receipt())
            else:
                self._loader.drop_backup(weights)
