"""Models and pools that agents hold on one device, and their sum. Pure.

The book has no opinion on caps: it adds up, previews, and can take back. Everything is kept
incrementally, so that 10,000 agents cost no more than ten.
"""

from __future__ import annotations

from vram_conductor.broker.ledger.claims import Claim, Measured, pool_key
from vram_conductor.broker.ledger.models import ModelEntry, Undo
from vram_conductor.broker.ledger.ordered import Peaks
from vram_conductor.broker.ledger.pools import Pool
from vram_conductor.protocol.values import KVType, LedgerMode, Line, PoolShape


class Book:
    """Sums of one device. ``mode`` as in ``DeviceSpec``."""

    def __init__(self, mode: LedgerMode) -> None:
        self._mode: LedgerMode = mode
        self._models: dict[str, ModelEntry] = {}
        self._pools: dict[str, Pool] = {}
        self._peaks = Peaks()
        self._weights_bytes = 0
        self._scratch_bytes = 0
        self._weights_lines: dict[str, Line] = {}
        self._scratch_lines: dict[str, Line] = {}
        self._pool_lines: dict[str, Line] = {}

    # --- sums -------------------------------------------------------------------------------

    @property
    def promised_bytes(self) -> int:
        """The promise without base and leases."""
        stays = self._weights_bytes if self._mode == "reserve" else 0
        return self._scratch_bytes + stays + self._peaks.top

    def promised_with(self, claim: Claim) -> int:
        """The promise if the claim were held."""
        fixed, weights = self._fixed_with(claim)
        pool = self._pools.get(claim.pool)
        size = pool.bytes_with(claim) if pool else claim.pool_bytes
        if self._mode == "reserve":
            return fixed + max(self._peaks.top_without((claim.pool,)), size)
        turn = max(size, self._siblings(claim))
        return fixed + max(self._peaks.top_without(self._keys(claim)), weights + turn)

    def pool_room(self, claim: Claim, room_bytes: int) -> int:
        """How large the claim's pool may be for the promise to stay within ``room_bytes``."""
        fixed, weights = self._fixed_with(claim)
        room = room_bytes - fixed
        if self._mode == "reserve":
            return max(0, room) if self._peaks.top_without((claim.pool,)) <= room else 0
        others = max(self._peaks.top_without(self._keys(claim)), weights + self._siblings(claim))
        return max(0, room - weights) if others <= room else 0

    def shape_with(self, model: str, kv_type: KVType, n_ctx: int, slots: int) -> PoolShape:
        """The pool's shape with one more agent."""
        pool = self._pools.get(pool_key(model, kv_type))
        return (pool or Pool("", model, kv_type)).shape_with(n_ctx, slots)

    def largest_n_ctx(self, claim: Claim, cells: int) -> int:
        """The largest n_ctx with which the claim's pool stays within ``cells``; 0: none."""
        pool = self._pools.get(claim.pool) or Pool("", claim.model, claim.kv_type)
        return pool.largest_n_ctx(cells, claim.slots)

    def alone_bytes(self, claim: Claim, measured: Measured) -> int:
        """The least that is promised for this agent if it is the only one: its weights and
        scratch, and its own pool where that shape's size is known."""
        entry, pool = self._models.get(claim.model), self._pools.get(claim.pool)
        weights = measured.weights_bytes
        if weights is None:
            weights = (
                entry.weights.bytes_with(claim.weights_bytes) if entry else claim.weights_bytes
            )
        scratch = measured.scratch_bytes
        if scratch is None:
            scratch = (
                entry.scratch.bytes_with(claim.scratch_bytes) if entry else claim.scratch_bytes
            )
        shape = Pool("", claim.model, claim.kv_type).shape_with(claim.n_ctx, claim.slots)
        if shape == claim.shape:
            size = claim.pool_bytes if measured.pool_bytes is None else measured.pool_bytes
            return weights + scratch + size
        figure = pool.figure(shape) if pool else None
        return weights + scratch + (figure.bytes if figure else 0)

    def _fixed_with(self, claim: Claim) -> tuple[int, int]:
        """(what does not take turns, the model's weights), with the claim held."""
        entry = self._models.get(claim.model)
        weights, scratch, contexts = claim.weights_bytes, claim.scratch_bytes, 1
        fixed = self._scratch_bytes + (self._weights_bytes if self._mode == "reserve" else 0)
        if entry:
            weights = entry.weights.bytes_with(weights)
            scratch = entry.scratch.bytes_with(scratch)
            contexts = len(entry.pools | {claim.pool})
            fixed -= entry.scratch_bytes + (entry.weights_bytes if self._mode == "reserve" else 0)
        return fixed + scratch * contexts + (weights if self._mode == "reserve" else 0), weights

    def _keys(self, claim: Claim) -> set[str]:
        entry = self._models.get(claim.model)
        return {claim.pool} | (entry.pools if entry else set())

    def _siblings(self, claim: Claim) -> int:
        """The largest other pool of the same model (another KV type)."""
        keys = self._keys(claim) - {claim.pool}
        return max((self._pools[key].bytes for key in keys), default=0)

    # --- changes ----------------------------------------------------------------------------

    def hold(self, claim: Claim) -> None:
        """Take a claim in: its estimates count until they are settled or withdrawn."""
        entry = self._models.get(claim.model)
        if entry is None:
            entry = self._models[claim.model] = ModelEntry(claim.model, claim.label)
        pool = self._pools.get(claim.pool)
        if pool is None:
            pool = self._pools[claim.pool] = Pool(claim.pool, claim.model, claim.kv_type)
            entry.pools.add(claim.pool)
        entry.agents += 1
        entry.weights.open(claim.weights_bytes)
        entry.scratch.open(claim.scratch_bytes)
        pool.join(claim)
        self._refresh(entry)

    def settle(self, claim: Claim) -> None:
        """The held claim's load succeeded."""
        entry = self._models[claim.model]
        entry.weights.settle(claim.weights_bytes)
        entry.scratch.settle(claim.scratch_bytes)
        self._pools[claim.pool].settle(claim)
        self._refresh(entry)

    def withdraw(self, claim: Claim) -> None:
        """The held claim's load failed: as if it had never been held."""
        entry = self._models[claim.model]
        entry.weights.withdraw(claim.weights_bytes)
        entry.scratch.withdraw(claim.scratch_bytes)
        self._pools[claim.pool].withdraw(claim)
        self._part(entry, claim)

    def leave(self, claim: Claim) -> None:
        """A settled claim ends."""
        self._pools[claim.pool].leave(claim)
        self._part(self._models[claim.model], claim)

    def _part(self, entry: ModelEntry, claim: Claim) -> None:
        entry.agents -= 1
        if not self._pools[claim.pool].agents:
            del self._pools[claim.pool]
            entry.pools.discard(claim.pool)
            self._peaks.drop(claim.pool)
            self._pool_lines.pop(claim.pool)
            self._scratch_lines.pop(claim.pool, None)
        self._refresh(entry)

    def remember(self, claim: Claim) -> None:
        """Keep the pool estimate of a claim that was withdrawn, if the pool still exists."""
        pool = self._pools.get(claim.pool)
        if pool:
            pool.remember(claim.shape, claim.pool_bytes)
            self._refresh(self._models[claim.model])

    def measure(
        self, model: str, measured: Measured, pool_key: str = "", shape: PoolShape | None = None
    ) -> Undo | None:
        """Enter measurements of a model and of its pool ``pool_key`` at ``shape``. To be
        confirmed, or taken back. None: the model has left."""
        entry = self._models.get(model)
        if entry is None:
            return None
        pool = self._pools.get(pool_key)
        undo = Undo(entry, pool)
        for figure, size in (
            (entry.weights, measured.weights_bytes),
            (entry.scratch, measured.scratch_bytes),
        ):
            if size is not None:
                undo.figures.append((figure, figure.mark()))
                figure.measure(size)
        if pool and shape and measured.pool_bytes is not None:
            known = pool.figure(shape)
            if known:
                undo.figures.append((known, known.mark()))
            else:
                undo.forget = shape
            pool.measure(shape, measured.pool_bytes)
        self._refresh(entry)
        return undo

    def take_back(self, undo: Undo) -> None:
        """The measurement was refused."""
        for figure, mark in undo.figures:
            figure.reset(mark)
        if undo.pool:
            if undo.forget:
                undo.pool.forget(undo.forget)
            undo.pool.count()
        self._refresh(undo.model)

    def confirm(self, undo: Undo, shape: PoolShape | None) -> None:
        """The measurement stands: estimates inside a measured shape cannot exceed it."""
        figure = undo.pool.figure(shape) if undo.pool and shape else None
        if undo.pool and shape and figure and figure.measured:
            undo.pool.confirm(shape)
            self._refresh(undo.model)

    def set_mode(self, mode: LedgerMode) -> None:
        """Change the formula; everybody's claims stay."""
        self._mode = mode
        for entry in self._models.values():
            self._refresh(entry)

    def _refresh(self, entry: ModelEntry) -> None:
        """Bring the sums and lines of one model up to date."""
        model = entry.model
        gone = not entry.agents
        weights = 0 if gone else entry.weights.bytes
        # Each pool is a context of its own, and its scratch stays when the pool gives way.
        each = entry.scratch.bytes
        scratch = each * len(entry.pools)
        self._weights_bytes += weights - entry.weights_bytes
        self._scratch_bytes += scratch - entry.scratch_bytes
        entry.weights_bytes, entry.scratch_bytes = weights, scratch
        for key in entry.pools:
            pool = self._pools[key]
            self._peaks.put(key, pool.bytes + (weights if self._mode == "timeshare" else 0))
            self._pool_lines[key] = pool.line()
            self._scratch_lines[key] = Line(f"scratch:{key}", each, not entry.scratch.measured)
            if not each:
                del self._scratch_lines[key]
        if gone:
            del self._models[model], self._weights_lines[model]
        else:
            self._weights_lines[model] = Line(
                f"weights:{model}", weights, not entry.weights.measured, entry.label
            )

    # --- views ------------------------------------------------------------------------------

    def model(self, model: str) -> ModelEntry | None:
        return self._models.get(model)

    def pool(self, key: str) -> Pool | None:
        return self._pools.get(key)

    def lines(self) -> tuple[Line, ...]:
        """Weights, scratch, pools; each in order of arrival."""
        # Unpacked, not yielded: with 10,000 models that is under 1 instead of 3 ms of every deny.
        return (
            *self._weights_lines.values(),
            *self._scratch_lines.values(),
            *self._pool_lines.values(),
        )

    def validate_state(self) -> None:
        """Recount the sums. Raises AssertionError: our bug."""
        models, pools = self._models.values(), self._pools.values()
        assert self._weights_bytes == sum(entry.weights.bytes for entry in models)
        assert self._scratch_bytes == sum(e.scratch.bytes * len(e.pools) for e in models)
        assert self._scratch_bytes == sum(line.bytes for line in self._scratch_lines.values())
        for entry in models:
            assert entry.agents == sum(self._pools[key].agents for key in entry.pools) > 0
        assert {p.key for p in pools} == {key for entry in models for key in entry.pools}
        turns = [p.recount() for p in pools]
        if self._mode == "timeshare":
            turns = [p.recount() + self._models[p.model].weights.bytes for p in pools]
        assert self._peaks.top == max(turns, default=0)
        assert set(self._pool_lines) == set(self._pools)
        assert set(self._weights_lines) == set(self._models)
