"""Carries out the planner's moves on engine and store, and measures them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.engine import Engine, Tokens
from vram_conductor.worker.job import Receipt
from vram_conductor.worker.loader import Loader, waits
from vram_conductor.worker.measured import check_measured
from vram_conductor.worker.opener import Opener
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.prefetch import BringKV
from vram_conductor.worker.residency import PoolState, Residency, Slot, Weights
from vram_conductor.worker.shortage import Shortage
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
        self._residency = residency
        self._parking = parking
        self._clock = clock
        self._loader = Loader(engine, residency, store, clock)
        self._opener = Opener(engine, residency, clock)
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
                ``loader.waits`` and ``given_up``), ``sleep_failed``, or the ledger's refusal with
                code ``MEASURED``. What was done before it stays done and is consistent.
        """
        try:
            self._carry_out(moves, receipt, reopen, meanwhile)
        except ConductorError as error:
            if waits(error):
                self._note_shortage(error)
            raise

    def _note_shortage(self, error: ConductorError) -> None:
        """Plan by what the device has said; the change makes it be measured again at once."""
        residency = self._residency
        ceiling = residency.resident_bytes() + int(error.info.details.get("free_bytes", 0))
        residency.shortage = Shortage(residency.budget_bytes, ceiling, self._clock())
        residency.revision += 1

    def _carry_out(
        self,
        moves: Sequence[Move],
        receipt: Receipt,
        reopen: str,
        meanwhile: Callable[[], None] | None,
    ) -> None:
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
                self._give_up(receipt)
                receipt.moved_ms += (self._clock() - begin - elsewhere_ns) / 1e6

    def _give_up(self, receipt: Receipt) -> None:
        """Weights that cannot be woken are loaded anew when somebody wants them again."""
        while self._loader.broken:
            weights = self._loader.broken.pop()
            if not weights.readers:
                self.unload(weights, receipt)

    def _do(self, move: Move, receipt: Receipt, reopen: str) -> None:
        pools, weights = self._residency.pools, self._residency.weights
        match move:
            case Park(key, index) | Drop(key, index):
                pool = pools[key]
                # A pool whose weights refused to sleep is closed, and parked, already.
                for slot in pool.slots[index : index + 1]:
                    self.empty(pool, slot, receipt, front=key == reopen)
            case SleepPool(key):
                self.sleep_pool(pools[key], receipt)
            case WakePool(key):
                self._opener.wake(pools[key])
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
        self._parking.vacate(pool, slot)
        self.swaps += 1
        self._residency.revision += 1

    def bring_kv(self, bring: BringKV, work: Tokens) -> bool:
        """Put a parked state into an empty slot ahead of its turn; whether it is there.

        ``work``: what the conversation will go on from: the job's ids, or the transcript's.
        """
        conversation = self._residency.conversation(bring.conversation)
        pool = self._residency.pools[bring.pool]
        slot = pool.slots[bring.slot]
        # One token is always left to compute: here it is one that does not exist yet.
        reuse = self._parking.resume(conversation, pool, slot, np.append(work, np.int32(0)))
        self._residency.revision += 1
        if reuse.tokens:
            self.swaps += 1
            return True
        self._parking.release(pool, slot)
        if reuse.reason in ("state_corrupt", "state_failed"):
            conversation.lost = reuse.reason
        return False

    # --- pools --------------------------------------------------------------------------------

    def close_pool(self, pool: PoolState, receipt: Receipt) -> None:
        """Close a pool, awake or asleep; what is still in its slots is parked."""
        if pool.handle is None:
            return
        for slot in pool.slots:
            self.empty(pool, slot, receipt)
        self._opener.close(pool)
        receipt.evicted.append(f"pool:{pool.key}")

    def open_pool(self, pool: PoolState) -> None:
        """Open a pool in its wanted shape.

        Raises:
            ConductorError: ``pool_failed``, or code ``MEASURED``; it is closed then.
        """
        self._loader.join()
        self._opener.open(pool)

    def sleep_pool(self, pool: PoolState, receipt: Receipt) -> None:
        """Put a pool to sleep; what is still in its slots is parked. One that refuses is closed."""
        if pool.handle is None:
            return
        for slot in pool.slots:
            self.empty(pool, slot, receipt)
        self._opener.sleep(pool)
        receipt.evicted.append(f"pool:{pool.key}")

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
                self._loader.restore(weights)
                raise
            log.error("%s is unloaded instead: %s", weights.path, error.info.message)
            self.unload(weights, receipt)
            return
        receipt.evicted.append(f"weights:{weights.model}")

    def backups(self) -> tuple[str, ...]:
        """Models that could be backed up, as there is room for it."""
        return self._loader.plan_backups().add

    def keep_promises(self) -> None:
        """Give back what backups take of the room that was promised to parked states: the least
        recently used ones go, and weights that sleep are unloaded with them."""
        self._loader.reconsider()
        for model in self._loader.plan_backups().drop:
            weights = self._residency.weights[model]
            if weights.asleep:
                self.unload(weights, Receipt())
            else:
                self._loader.drop_backup(weights)
