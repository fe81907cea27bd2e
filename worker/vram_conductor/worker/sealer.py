"""The sealing thread: computes the checksum of parked states beside the engine's work, and pins
their memory when there is nothing to seal."""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.arena import Arena

log = logging.getLogger(__name__)

RETRY_S = 0.02
"""How long an arena that is being used is left alone before it is pinned."""


@dataclass(frozen=True)
class Pin:
    """What is only to be pinned."""

    arena: Arena


class Sealer:
    """Seals arenas in the order in which they come, then pins them.

    A state without a seal is not adopted after a crash; until it is sealed (milliseconds) the
    state before it is what a crash would leave. Pinning takes longer and only makes copies faster:
    a piece at a time, and never while there is something to seal.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Arena | Pin | threading.Event | None] = queue.SimpleQueue()
        # What waits in the queue: a state parked again before its turn is sealed once, so that
        # the thread is never further behind than there are arenas.
        self._waiting: set[Arena] = set()
        self._to_pin: dict[Arena, None] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="sealer", daemon=True)
        self._thread.start()

    def submit(self, arena: Arena, *, pin: bool = False) -> None:
        """Seal the arena's committed state soon, and then pin it, if so asked. Called by the
        thread that uses the store."""
        with self._lock:
            if arena not in self._waiting:
                self._waiting.add(arena)
                arena.hold()
                self._queue.put(arena)
        if pin:
            self.pin(arena)

    def pin(self, arena: Arena) -> None:
        """Pin the arena's memory soon, without sealing anything."""
        self._queue.put(Pin(arena))

    def _loop(self) -> None:
        patience_s = 0.0
        while True:
            try:
                item = self._queue.get(timeout=patience_s if self._to_pin else None)
            except queue.Empty:
                patience_s = self._pin()
                continue
            patience_s = 0.0
            if item is None:
                return
            if isinstance(item, threading.Event):
                item.set()
            elif isinstance(item, Pin):
                self._to_pin[item.arena] = None
            else:
                self._seal(item)

    def _seal(self, arena: Arena) -> None:
        with self._lock:
            # Before the state is read: one that is committed from now on is a new turn.
            self._waiting.discard(arena)
        try:
            arena.seal()
        finally:
            arena.release()

    def _pin(self) -> float:
        """Pin one piece; returns how long to wait for something to seal before the next one."""
        for arena in list(self._to_pin):
            try:
                progress = arena.pin_some()
            except ConductorError as error:
                log.error("a parked state is left as it is: %s", error.info.message)
                progress = "done"
            if progress == "more":
                return 0.0
            if progress == "done":
                del self._to_pin[arena]
                return 0.0
        return RETRY_S

    def settle(self) -> None:
        """Wait until all that was submitted is sealed and released: memory that is being read
        cannot be given back."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Finish what was submitted, pin no more, then end the thread."""
        self._queue.put(None)
        self._thread.join()
