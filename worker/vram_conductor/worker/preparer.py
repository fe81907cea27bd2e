"""The threads that prepare prompts beside the engine's work.

Two lanes: what is short never waits behind what is long. A call into the tokenizer cannot be
interrupted; while it runs the interpreter is free for others.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from vram_conductor.worker.prepare import Task

SHORT_CHARS = 16 * 1024
"""Longer texts take the other lane; this long a one takes milliseconds."""

TINY_CHARS, TINY_TOKENS = 256, 8192
"""What is shorter, in a conversation that is no longer, and needs no template, is made on the
spot: that takes less than handing it over and back."""

WAITING_MAX = 2
"""Tasks of one lane that are under way at a time: the engine thread knows better which is next."""


class _Lane:
    """One thread and what it has to do."""

    def __init__(self, name: str, done: Callable[[Task], None]) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._done = done
        self.pending = 0
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task | None) -> None:
        self._queue.put(task)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while (task := self._queue.get()) is not None:
            task.carry_out()
            self._done(task)


def _is_tiny(task: Task) -> bool:
    run = task.run
    if run.messages is not None or run.structured or task.size > TINY_CHARS:
        return False
    return len(task.transcript.ids) + len(run.tokens or ()) <= TINY_TOKENS


class ThreadPreparer:
    """See ``preparing.Preparer``.

    Args:
        wake: called on a lane's thread whenever something is finished.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._finished: deque[Task] = deque()
        self._lanes = (_Lane("prepare", self._finish), _Lane("prepare-long", self._finish))
        self._lane_of: dict[Task, _Lane] = {}

    def submit(self, task: Task) -> bool:
        """Take a task; engine thread only, as is :meth:`finished`."""
        if _is_tiny(task):
            task.carry_out()
            self._finished.append(task)
            return True
        lane = self._lanes[task.size > SHORT_CHARS]
        if lane.pending >= WAITING_MAX:
            return False
        lane.pending += 1
        self._lane_of[task] = lane
        lane.put(task)
        return True

    def finished(self) -> list[Task]:
        """What has been carried out since the last call."""
        done = [self._finished.popleft() for _ in range(len(self._finished))]
        for task in done:
            if (lane := self._lane_of.pop(task, None)) is not None:
                lane.pending -= 1
        return done

    def _finish(self, task: Task) -> None:
        self._finished.append(task)
        self._wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Start nothing more; what is under way is waited for, up to ``timeout_s`` a lane."""
        for task in list(self._lane_of):
            task.wanted = False
        for lane in self._lanes:
            lane.put(None)
        for lane in self._lanes:
            lane.join(timeout_s)
