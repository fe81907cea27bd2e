"""Lanes: where what the engine thread has decided is carried out.

A lane carries out one errand after the other. :class:`InlineLanes` do it at once on the calling
thread (cpu, most tests), :class:`ThreadLanes` on one thread per lane: one for each open pool, and
one that hauls. The calls into the library release the interpreter, so lanes run side by side.
Whatever they do, an errand comes back to the engine thread, which draws the conclusions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from typing import Protocol

JOIN_S = 2.0
"""How long leaving waits for a lane: one that hangs must not keep the process."""


class Errand:
    """Something to be done on a lane.

    Attributes:
        lane: name of the lane: a pool's key, or ``traffic.HAULER``.
        serial: counts errands in the order in which they began.
        error: what went wrong, once it has been carried out.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.serial = 0
        self.error: Exception | None = None

    def carry_out(self) -> None:
        """Do it, on the lane. Never raises."""
        try:
            self.do()
        except Exception as error:
            self.error = error

    def do(self) -> None:
        """The work itself; may raise."""
        raise NotImplementedError

    def finish(self) -> None:
        """Draw the conclusions, on the engine thread."""
        raise NotImplementedError


class Lanes(Protocol):
    """All lanes of a worker. Engine thread only.

    Attributes:
        parallel: errands are carried out elsewhere, while the engine thread goes on.
    """

    parallel: bool

    def submit(self, errand: Errand) -> None:
        """Have it carried out on its lane, which has nothing else to do."""

    def finished(self) -> list[Errand]:
        """What has been carried out since the last call, in the order in which it began."""

    def wait(self) -> list[Errand]:
        """The same, but at least one; something must be under way."""

    def keep(self, names: Collection[str]) -> None:
        """End the lanes that are not among these; nothing is under way on them."""

    def close(self) -> None:
        """End all lanes, after what is under way."""


class InlineLanes:
    """Carries errands out on the spot."""

    parallel = False

    def __init__(self) -> None:
        self._finished: list[Errand] = []

    def submit(self, errand: Errand) -> None:
        errand.carry_out()
        self._finished.append(errand)

    def finished(self) -> list[Errand]:
        done, self._finished = self._finished, []
        return done

    def wait(self) -> list[Errand]:
        done = self.finished()
        assert done
        return done

    def keep(self, names: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass


class _Lane:
    """One thread, and the errand that it has."""

    def __init__(self, name: str, done: Callable[[Errand], None]) -> None:
        self._done = done
        self._queue: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"lane {name}", daemon=True)
        self._thread.start()

    def put(self, errand: Errand | None) -> None:
        self._queue.put(errand)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _loop(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand.carry_out()
            self._done(errand)
            # Nothing of it may live on until the next one comes: it holds a pool.
            del errand


class ThreadLanes:
    """One thread per lane, made when its first errand comes.

    Args:
        wake: called on a lane's thread whenever something is finished.
    """

    parallel = True

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lanes: dict[str, _Lane] = {}
        self._finished: queue.SimpleQueue[Errand] = queue.SimpleQueue()

    def submit(self, errand: Errand) -> None:
        lane = self._lanes.get(errand.lane)
        if lane is None:
            lane = self._lanes[errand.lane] = _Lane(errand.lane, self._finish)
        lane.put(errand)

    def _finish(self, errand: Errand) -> None:
        self._finished.put(errand)
        self._wake()

    def finished(self) -> list[Errand]:
        if self._finished.empty():
            return []
        done = [self._finished.get_nowait() for _ in range(self._finished.qsize())]
        if len(done) > 1:
            done.sort(key=lambda errand: errand.serial)
        return done

    def wait(self) -> list[Errand]:
        first = self._finished.get()
        return sorted([first, *self.finished()], key=lambda errand: errand.serial)

    def keep(self, names: Collection[str]) -> None:
        gone = [name for name in self._lanes if name not in names]
        for name in gone:
            self._lanes[name].put(None)
        for name in gone:
            self._lanes.pop(name).join()

    def close(self) -> None:
        self.keep(())
