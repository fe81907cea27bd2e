"""Carries out the planner's moves on engine and store, and measures them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from vram_conductor.protocol.errors import (
    LEDGER_DENY,
    ConductorError,
    FailedPrecondition,
    LedgerDeny,
)
from vram_conductor.worker.engine import Engine
from vram_conductor.worker.job import Receipt
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.residency import PoolState, Residency, Slot, Weights
from vram_conductor.worker.world import (
    ClosePool,
    Drop,
    LoadWeights,
    Move,
    OpenPool,
    Park,
    UnloadWeights,
)

log = logging.getLogger(__name__)


class Mover:
    """The only one that opens, closes, loads and unloads.

    Attributes:
        swaps: how often a conversation's KV left its slot or came back.
        loading: weights are being loaded, which may take long and counts no steps.
        switches: how often pools or weights had to go for something else.
    """

    def __init__(
        self,
        engine: Engine,
        residency: Residency,
        parking: Parking,
        clock: Callable[[], int],
    ) -> None:
        self._engine = engine
        self._residency = residency
        self._parking = parking
        self._clock = clock
        self.loading = False
        self.swaps = 0
        self.switches = 0

    def carry_out(self, moves: Sequence[Move], receipt: Receipt, *, reopen: str = "") -> None:
        """Do ``moves`` in order.

        ``reopen``: the pool that is closed only to be opened again; its jobs come back first.

        Raises:
            ConductorError: ``load_failed``, ``pool_failed``, or the ledger's refusal with code
                ``MEASURED``. What was done before it stays done and is consistent.
        """
        begin = self._clock()
        gone = [move for move in moves if isinstance(move, ClosePool | UnloadWeights)]
        if any(move != ClosePool(reopen) for move in gone):
            self.switches += 1
        try:
            for move in moves:
                self._do(move, receipt, reopen)
        finally:
            receipt.moved_ms += (self._clock() - begin) / 1e6

    def _do(self, move: Move, receipt: Receipt, reopen: str) -> None:
        residency = self._residency
        match move:
            case Park(key, index) | Drop(key, index):
                pool = residency.pools[key]
                self.empty(pool, pool.slots[index], receipt, front=key == reopen)
            case ClosePool(key):
                self.close_pool(residency.pools[key], receipt)
            case OpenPool(key):
                self.open_pool(residency.pools[key])
            case UnloadWeights(model):
                self.unload(residency.weights[model], receipt)
            case LoadWeights(model):
                self.load(residency.weights[model])

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

    def close_pool(self, pool: PoolState, receipt: Receipt) -> None:
        """Close a pool; what is still in its slots is parked."""
        if pool.handle is None:
            return
        for slot in pool.slots:
            self.empty(pool, slot, receipt)
        pool.handle.close()
        pool.handle, pool.slots, pool.open_bytes, pool.stage_ns = None, [], 0, None
        receipt.evicted.append(f"pool:{pool.key}")
        self._residency.revision += 1

    def open_pool(self, pool: PoolState) -> None:
        """Open a pool in its wanted shape.

        Raises:
            ConductorError: ``pool_failed``, or code ``MEASURED``; it is closed then.
        """
        assert pool.handle is None
        assert pool.weights.handle is not None
        begin = self._clock()
        pool.handle = pool.weights.handle.open_pool(pool.want)
        pool.open_ms = (self._clock() - begin) / 1e6
        pool.slots = [Slot(index) for index in range(pool.want.slots)]
        promised, pool.open_bytes = pool.want_bytes, pool.handle.measured_bytes
        pool.want_bytes, pool.measured = pool.open_bytes, True
        self._residency.rates.note("open_pool", pool.open_bytes, pool.open_ms)
        pool.used_ns = self._clock()
        self._residency.revision += 1
        try:
            self._check_measured(f"pool:{pool.key}", promised, pool.open_bytes)
        except ConductorError:
            self.close_pool(pool, Receipt())
            raise

    def load(self, weights: Weights) -> None:
        """Load a model.

        Raises:
            ConductorError: ``load_failed``, or code ``MEASURED``; nothing is loaded then.
        """
        if weights.handle is not None:
            return
        begin = self._clock()
        self.loading = True
        try:
            handle = self._engine.load(weights.path, weights.path.rsplit("/", 1)[-1])
        finally:
            self.loading = False
        if handle.info.model != weights.model:
            handle.close()
            raise FailedPrecondition(
                "model_changed",
                f"{weights.path} is not the file that was admitted; register the agent again",
                path=weights.path,
                admitted=weights.model,
                found=handle.info.model,
            )
        weights.handle = handle
        weights.load_ms = (self._clock() - begin) / 1e6
        promised, weights.bytes = weights.bytes, weights.handle.measured_bytes
        weights.measured = True
        self._residency.rates.note("load", weights.bytes, weights.load_ms)
        weights.used_ns = self._clock()
        self._residency.revision += 1
        try:
            self._check_measured(f"weights:{weights.model}", promised, weights.bytes)
        except ConductorError:
            self.unload(weights, Receipt())
            raise

    def unload(self, weights: Weights, receipt: Receipt) -> None:
        """Free a model's weights; its pools are closed first. Nobody may be reading them."""
        assert weights.readers == 0
        for pool in self._residency.pools.values():
            if pool.weights is weights:
                self.close_pool(pool, receipt)
        if weights.handle is not None:
            weights.handle.close()
            weights.handle = None
            receipt.evicted.append(f"weights:{weights.model}")
            self._residency.revision += 1

    def _check_measured(self, line: str, promised_bytes: int, measured_bytes: int) -> None:
        """An estimate that was too low must not push the device beyond the budget."""
        resident, budget = self._residency.resident_bytes(), self._residency.budget_bytes
        if resident <= budget:
            return
        log.error("%s takes %d bytes, %d were estimated", line, measured_bytes, promised_bytes)
        details = {
            "code": "MEASURED",
            "line": line,
            "requested_bytes": promised_bytes,
            "measured_bytes": measured_bytes,
            "resident_bytes": resident,
            "budget_bytes": budget,
        }
        error = LedgerDeny(
            LEDGER_DENY,
            f"{line} was estimated at {promised_bytes} bytes and took {measured_bytes}: "
            f"{resident} bytes would be resident and the budget is {budget}; "
            "register it with a smaller n_ctx",
            retryable=True,
        )
        error.info = msgspec.structs.replace(error.info, details=details)
        raise error
