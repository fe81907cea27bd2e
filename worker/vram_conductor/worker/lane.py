"""Lanes: where what the engine thread has decided is carried out.

A lane carries out one errand after the other. :class:`InlineLanes` do it at once on the calling
thread (cpu, most tests), :class:`ThreadLanes` on one thread per lane: one for each open pool, and
one that hauls. The calls into the library release the interpreter, so lanes run side by side.
Whatever they do, an errand reports to the engine thread, which draws the conclusions.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from typing import Protocol

JOIN_S = 2.0
"""How long leaving waits for a lane: one that hangs must not keep the process."""

AHEAD = 8
"""What is wanted of a lane stops it after the batch that it is at; this only bounds how far it
runs ahead of the engine thread."""


class Errand:
    """Something to be done on a lane.

    Attributes:
        lane: name of the lane: a pool's key, or ``traffic.HAULER``.
        serial: counts errands in the order in which they began.
        stop: the engine thread wants it back; one that goes on by itself ends at the next chance.
        over: it has been carried out.
        error: what went wrong, once it has been carried out.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.serial = 0
        self.stop = False
        self.over = False
        self.error: Exception | None = None

    def carry_out(self, report: Report) -> None:
        """Do it, on the lane. Never raises. ``report``: told at the end, and whenever there is
        something for the engine thread before."""
        try:
            self.do(report)
        except Exception as error:
            self.error = error
        self.over = True
        report(self)

    def do(self, report: Report) -> None:
        """The work itself; may raise."""
        raise NotImplementedError

    def finish(self, *, over: bool) -> None:
        """Draw the conclusions from what has been reported, on the engine thread. ``over``:
        nothing is under way for it any more; else it will report again."""
        raise NotImplementedError


Report = Callable[[Errand], None]


class Lanes(Protocol):
    """All lanes of a worker. Engine thread only.

    Attributes:
        parallel: errands are carried out elsewhere, while the engine thread goes on.
        ahead: how many batches a lane computes at most before the engine thread has a say again.
    """

    parallel: bool
    ahead: int

    def submit(self, errand: Errand) -> None:
        """Have it carried out on its lane, which has nothing else to do."""

    def finished(self) -> list[Errand]:
        """What has reported since the last call, in the order in which it began."""
        ...

    def wait(self) -> list[Errand]:
        """The same, but at least one; something must be under way."""
        ...

    def keep(self, names: Collection[str]) -> None:
        """End the lanes that are not among these; nothing is under way on them."""

    def close(self) -> None:
        """End all lanes, after what is under way."""


class InlineLanes:
    """Carry errands out on the spot."""

    parallel = False
    ahead = 1

    def __init__(self) -> None:
        self._finished: list[Errand] = []

    def submit(self, errand: Errand) -> None:
        errand.carry_out(self._finished.append)

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

    def __init__(self, name: str, report: Report) -> None:
        self._report = report
        self._queue: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"lane {name}", daemon=True)
        self._thread.start()

    def put(self, errand: Errand | None) -> None:
        self._queue.put(errand)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _loop(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand.carry_out(self._report)
            # Nothing of it may live on until the next one comes: it holds a pool.
            del errand


class ThreadLanes:
    """One thread per lane, made when its first errand comes.

    Args:
        wake: called on a lane's thread whenever something is reported.
    """

    parallel = True

    def __init__(self, wake: Callable[[], None], ahead: int = AHEAD) -> None:
        self.ahead = ahead
        self._wake = wake
        self._lanes: dict[str, _Lane] = {}
        self._finished: queue.SimpleQueue[Errand] = queue.SimpleQueue()

    def submit(self, errand: Errand) -> None:
        lane = self._lanes.get(errand.lane)
        if lane is None:
            lane = self._lanes[errand.lane] = _Lane(errand.lane, self._take)
        lane.put(errand)

    def _take(self, errand: Errand) -> None:
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
