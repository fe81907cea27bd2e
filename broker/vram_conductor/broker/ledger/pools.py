"""One pool in the ledger: its members' shape, and what is known of its size. Pure.

    cells = Σ pad256(n_ctx) of the k largest members, k = min(members, slots)
    slots = the most that any member asks for

The worker estimates one shape at a time, so every size it ever told is remembered. The size of
a shape is

- known: the largest known size of the shapes *inside* it, itself included: a larger pool never
  counts less than a smaller one, whatever an estimator says;
- not known (a member left): the smallest size among the known shapes *around* it.

Both never grow when a shape shrinks, so a leaving member cannot push the ledger over its cap.
"""

from __future__ import annotations

from vram_conductor.broker.ledger.claims import Claim, pad_cells
from vram_conductor.broker.ledger.figure import Figure
from vram_conductor.broker.ledger.ordered import Multiset
from vram_conductor.protocol.values import KVType, Line, PoolShape

FIGURES_MAX = 64
"""Remembered sizes per pool, beyond those of open reservations."""

FIGURES_KEPT = 32
"""How many of those used last are kept when there are too many."""

Key = tuple[int, int]


class Pool:
    """Members and sizes of one pool. ``bytes`` is its size now, in bytes; call :meth:`count`
    after every change of a figure."""

    __slots__ = ("_cells", "_figures", "_slots", "bytes", "key", "kv_type", "model")

    def __init__(self, key: str, model: str, kv_type: KVType) -> None:
        self.key = key
        self.model = model
        self.kv_type: KVType = kv_type
        self.bytes = 0
        self._cells: Multiset[int] = Multiset()
        self._slots: Multiset[int] = Multiset()
        self._figures: dict[Key, Figure] = {}

    @property
    def agents(self) -> int:
        return len(self._cells)

    # --- shapes -----------------------------------------------------------------------------

    @property
    def shape(self) -> PoolShape:
        """The shape now. There must be a member."""
        cells, slots = self._shape()
        return PoolShape(cells, slots, self.kv_type)

    def _shape(self) -> Key:
        slots = self._slots.top
        return sum(self._cells.largest(slots)), slots

    def shape_with(self, n_ctx: int, slots: int) -> PoolShape:
        """The shape with one more member. O(slots)."""
        most = max(slots, self._slots.top) if self._slots else slots
        own = pad_cells(n_ctx)
        top = self._cells.largest(most)
        smallest = top[0] if len(top) == most else 0
        return PoolShape(sum(top) - smallest + max(own, smallest), most, self.kv_type)

    def largest_n_ctx(self, cells: int, slots: int) -> int:
        """The largest n_ctx, a multiple of the padding, with which one more member that asks
        for ``slots`` leaves the pool within ``cells``; 0: none."""
        most = max(slots, self._slots.top) if self._slots else slots
        top = self._cells.largest(most)
        smallest = top[0] if len(top) == most else 0
        rest = cells - (sum(top) - smallest)
        own = rest - rest % pad_cells(1)
        return own if own >= max(smallest, 1) else 0

    # --- members ----------------------------------------------------------------------------

    def join(self, claim: Claim) -> None:
        """A reservation opens."""
        self._cells.add(pad_cells(claim.n_ctx))
        self._slots.add(claim.slots)
        self._figure(claim.shape).open(claim.pool_bytes)
        self.count()

    def settle(self, claim: Claim) -> None:
        """The reservation is committed."""
        figure = self._figures[_key(claim.shape)]
        figure.settle(claim.pool_bytes)
        for (cells, slots), other in self._figures.items():
            if other.measured and cells >= claim.shape.cells and slots >= claim.shape.slots:
                figure.limit(other.bytes)
        self.count()
        self._tidy()

    def withdraw(self, claim: Claim) -> None:
        """The reservation is rolled back, and its estimate is forgotten."""
        self._part(claim)
        figure = self._figures[_key(claim.shape)]
        figure.withdraw(claim.pool_bytes)
        if not figure.known:
            del self._figures[_key(claim.shape)]
        self.count()

    def leave(self, claim: Claim) -> None:
        """A committed member leaves; what was learnt stays."""
        self._part(claim)
        self.count()
        self._tidy()

    def _part(self, claim: Claim) -> None:
        self._cells.remove(pad_cells(claim.n_ctx))
        self._slots.remove(claim.slots)

    # --- sizes ------------------------------------------------------------------------------

    def remember(self, shape: PoolShape, estimate: int) -> None:
        """Keep an estimate whose reservation is gone."""
        self._figure(shape).remember(estimate)
        self.count()

    def figure(self, shape: PoolShape) -> Figure | None:
        """What is known of exactly this shape."""
        return self._figures.get(_key(shape))

    def measure(self, shape: PoolShape, size: int) -> None:
        """What a pool of ``shape`` really takes."""
        self._figure(shape).measure(size)
        self.count()

    def forget(self, shape: PoolShape) -> None:
        """Undo a measurement of a shape that nobody had told of before."""
        del self._figures[_key(shape)]
        self.count()

    def confirm(self, shape: PoolShape) -> None:
        """The measurement of ``shape`` stands: no estimate of a shape inside exceeds it."""
        size = self._figures[_key(shape)].bytes
        for (cells, slots), figure in self._figures.items():
            if cells <= shape.cells and slots <= shape.slots:
                figure.limit(size)
        self.count()

    def bytes_with(self, claim: Claim) -> int:
        """The size if the claim joined; its shape must be :meth:`shape_with`'s. O(figures)."""
        key = _key(claim.shape)
        figure = self._figures.get(key)
        own = figure.bytes_with(claim.pool_bytes) if figure else claim.pool_bytes
        return max(own, self._inside(key))

    def count(self) -> None:
        """Bring ``bytes`` up to date."""
        if not self._cells:
            self.bytes = 0
            return
        now = self._shape()
        stands_on = now if now in self._figures else self._around(now)
        # The one used last is the last that _tidy forgets.
        self._figures[stands_on] = self._figures.pop(stands_on)
        self.bytes = self._inside(stands_on)

    def _figure(self, shape: PoolShape) -> Figure:
        return self._figures.setdefault(_key(shape), Figure())

    def _size(self, key: Key) -> int:
        return self._inside(key if key in self._figures else self._around(key))

    def _inside(self, key: Key) -> int:
        cells, slots = key
        sizes = (f.bytes for (c, s), f in self._figures.items() if c <= cells and s <= slots)
        return max(sizes, default=0)

    def _around(self, key: Key) -> Key:
        """The known shape around ``key`` that counts least. There always is one: that of the
        latest member still here, or the one that :meth:`_tidy` kept."""
        cells, slots = key
        around = [k for k in self._figures if k[0] >= cells and k[1] >= slots]
        return min(around, key=self._inside)

    def _tidy(self) -> None:
        """Forget figures long unused; never the one that the size now stands on, which was used
        last. Not while a reservation is open: its rollback must find them."""
        if len(self._figures) <= FIGURES_MAX or any(f.is_open for f in self._figures.values()):
            return
        self._figures = dict(list(self._figures.items())[-FIGURES_KEPT:])
        self.count()

    # --- views ------------------------------------------------------------------------------

    @property
    def unmeasured(self) -> bool:
        """Whether no pool of exactly this shape was measured."""
        figure = self._figures.get(self._shape())
        return figure is None or not figure.measured

    def line(self) -> Line:
        cells, slots = self._shape()
        detail = f"{cells} cells, {_plural(slots, 'slot')}, {_plural(self.agents, 'agent')}"
        return Line(f"pool:{self.key}", self.bytes, self.unmeasured, detail)

    def recount(self) -> int:
        """The size, counted anew."""
        return self._size(self._shape())


def _key(shape: PoolShape) -> Key:
    return shape.cells, shape.slots


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
