"""The sealing thread: computes the checksum of parked states beside the engine's work."""

from __future__ import annotations

import queue
import threading

from vram_conductor.worker.arena import Arena


class Sealer:
    """Seals arenas in the order in which they come.

    A state without a seal is not adopted after a crash; until it is sealed (milliseconds) the
    state before it is what a crash would leave.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="sealer", daemon=True)
        self._thread.start()

    def submit(self, arena: Arena) -> None:
        """Seal the arena's committed state soon. Called by the engine thread."""
        arena.pin()
        self._queue.put(arena)

    def _loop(self) -> None:
        while (arena := self._queue.get()) is not None:
            try:
                arena.seal()
            finally:
                arena.unpin()

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._queue.put(None)
        self._thread.join()
