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
        self._queue: queue.SimpleQueue[Arena | threading.Event | None] = queue.SimpleQueue()
        # What waits in the queue: a state parked again before its turn is sealed once, so that
        # the thread is never further behind than there are arenas.
        self._waiting: set[Arena] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="sealer", daemon=True)
        self._thread.start()

    def submit(self, arena: Arena) -> None:
        """Seal the arena's committed state soon. Called by the engine thread."""
        with self._lock:
            if arena in self._waiting:
                return
            self._waiting.add(arena)
            arena.pin()
            self._queue.put(arena)

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            with self._lock:
                # Before the state is read: one that is committed from now on is a new turn.
                self._waiting.discard(item)
            try:
                item.seal()
            finally:
                item.unpin()

    def settle(self) -> None:
        """Wait until all that was submitted is sealed and unpinned: memory that is being read
        cannot be given back."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
        self._queue.put(None)
        self._thread.join()
