"""What is under way on the lanes, and which pools must be left alone for it. Engine thread only.

There is at most one batch per pool, and at most one *haul*: moves, with whatever copies belong to
them. A haul begins when nothing is under way in the pools that it touches; until it is finished
nobody else touches them. A pool that is *held* gets no further batch: somebody waits for it to
become quiet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from vram_conductor.worker.lane import Errand, Lanes, Report
from vram_conductor.worker.world import Move, PoolMove, WeightsMove

if TYPE_CHECKING:
    from vram_conductor.worker.job import Job
    from vram_conductor.worker.residency import Residency

HAULER = "hauler"


class Haul(Errand):
    """Moves, and whatever belongs to them.

    Attributes:
        pools: keys of the pools that it touches.
        models: models whose weights it may load, unload, wake or send to sleep.
        job: the job that it is for, if it is for one.
    """

    def __init__(
        self,
        touches: Touches,
        work: Callable[[], None],
        then: Callable[[Exception | None], None],
        job: Job | None = None,
    ) -> None:
        """``work`` runs on the hauler; ``then`` on the engine thread, with what went wrong."""
        super().__init__(HAULER)
        self.pools, self.models = touches
        self.job = job
        self._work = work
        self._then = then

    def do(self, report: Report) -> None:
        self._work()

    def finish(self, *, over: bool) -> None:
        assert over
        self._then(self.error)


Touches = tuple[frozenset[str], frozenset[str]]
"""Keys of pools, and models."""


def touches(residency: Residency, moves: Iterable[Move], *pools: str) -> Touches:
    """What ``moves`` touch, and ``pools`` besides. Whoever moves weights touches every pool of
    theirs."""
    models = {move.model for move in moves if isinstance(move, WeightsMove)}
    named = {move.pool for move in moves if isinstance(move, PoolMove)}
    theirs = {key for key, pool in residency.pools.items() if pool.weights.model in models}
    return frozenset(named | theirs | set(pools)), frozenset(models)


class Traffic:
    """Begins errands and takes them back.

    Attributes:
        held: keys of the pools that get no further batch, see :meth:`hold`.
        haul: the haul that is under way.
        rests: no haul begins: somebody wants to see what is where while nothing is moved.
        landed: called whenever something has come back and was finished.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._batches: dict[str, Errand] = {}
        self._back: deque[Errand] = deque()
        self._next_serial = 0
        self.haul: Haul | None = None
        self.rests = False
        self.held: frozenset[str] = frozenset()
        self.landed: Callable[[], None] = lambda: None

    @property
    def parallel(self) -> bool:
        """Whether the engine thread goes on while errands are carried out."""
        return self._lanes.parallel

    @property
    def ahead(self) -> int:
        """How many batches an errand may compute at most."""
        return self._lanes.ahead

    # --- questions ----------------------------------------------------------------------------

    def occupied(self, key: str) -> bool:
        """Whether something is under way in a pool."""
        return key in self._batches or (self.haul is not None and key in self.haul.pools)

    def hauled(self, key: str) -> bool:
        """Whether the haul that is under way touches a pool."""
        return self.haul is not None and key in self.haul.pools

    def moves_weights(self, model: str) -> bool:
        """Whether the haul that is under way may take a model's weights away, or bring them."""
        return self.haul is not None and model in self.haul.models

    def quiet(self, keys: Iterable[str]) -> bool:
        """Whether nothing is under way in these pools."""
        return not any(self.occupied(key) for key in keys)

    def free(self, key: str) -> bool:
        """Whether a pool may get a batch."""
        return key not in self.held and not self.occupied(key)

    def progress(self, *, patient: bool) -> tuple[int, bool]:
        """A number that changes as long as nothing hangs, and whether it should change.

        It is the serial of the oldest errand under way: one lane that hangs is noticed though
        others go on. ``patient``: the haul may take its time. Any thread.
        """
        serials = [errand.serial for errand in list(self._batches.values())]
        haul = self.haul
        if haul is not None and not patient:
            serials.append(haul.serial)
        return min(serials, default=self._next_serial), bool(serials)

    @property
    def idle(self) -> bool:
        """Whether nothing at all is under way."""
        return self.haul is None and not self._batches

    # --- errands ------------------------------------------------------------------------------

    def begin(self, errand: Errand) -> None:
        """Have an errand carried out; without lanes of their own it is finished on return."""
        errand.serial = self._next_serial
        self._next_serial += 1
        if isinstance(errand, Haul):
            assert self.haul is None
            assert self.quiet(errand.pools)
            self.haul = errand
        else:
            assert not self.occupied(errand.lane)
            self._batches[errand.lane] = errand
        self._lanes.submit(errand)
        if not self._lanes.parallel:
            self.collect()

    def run(self, haul: Haul) -> None:
        """Carry a haul out here and now, beside another one: it takes next to no time."""
        assert self.quiet(haul.pools)
        haul.carry_out(lambda errand: errand.finish(over=True))

    def collect(self) -> bool:
        """Take back what has been carried out; whether there was anything."""
        done = self._lanes.finished()
        self._land(done)
        return bool(done)

    def quiesce(self, keys: Collection[str] | None = None) -> None:
        """Wait until nothing is under way in these pools (or anywhere)."""
        self.call_back(self._batches if keys is None else keys)
        while not (self.idle if keys is None else self.quiet(keys)):
            self._land([] if self._back else self._lanes.wait())

    def hold(self, keys: Iterable[str]) -> None:
        """From now on these pools are held, and no others."""
        self.held = frozenset(keys)
        self.call_back(self.held)

    def call_back(self, keys: Iterable[str]) -> None:
        """What is under way in these pools is wanted back."""
        for key in keys:
            batch = self._batches.get(key)
            if batch is not None:
                batch.stop = True

    def _land(self, errands: list[Errand]) -> None:
        # Whoever is finished may wait in turn, for what has come back together with it, too.
        self._back.extend(errands)
        while self._back:
            errand = self._back.popleft()
            over = errand.over
            if over:
                if errand is self.haul:
                    self.haul = None
                elif self._batches.get(errand.lane) is errand:
                    del self._batches[errand.lane]
            errand.finish(over=over)
            self.landed()

    def retire(self, open_pools: Collection[str]) -> None:
        """End the lanes of pools that are open no more."""
        self._lanes.keep({HAULER, *open_pools, *self._batches})
