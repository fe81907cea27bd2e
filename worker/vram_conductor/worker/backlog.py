"""Messages that wait for the socket. *Pure.*

The engine never waits: what the socket does not take lies here. Output of one attempt that waits
is joined into one message, and of reports on residency only the newest stays, so a slow link
costs memory in proportion to the number of jobs and the length of their texts. Nothing else is
ever dropped while the session lasts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from vram_conductor.protocol.commands import Reply, Residency, RunTokens

JOIN_CHARS_MAX = 64 * 1024
JOIN_IDS_MAX = 16 * 1024


@dataclass
class Waiting:
    """A message in the queue; ``message`` is None once something newer made it void."""

    message: msgspec.Struct | None
    raw: list[bytes]


class Backlog:
    """A FIFO that joins and replaces."""

    def __init__(self) -> None:
        self._queue: deque[Waiting] = deque()
        self._last_of: dict[tuple[int, int], Waiting] = {}
        self._residency: Waiting | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, message: msgspec.Struct, raw: list[bytes]) -> None:
        """Append a message, or join it with one that waits."""
        if isinstance(message, RunTokens) and self._join(message):
            return
        entry = Waiting(message, raw)
        if isinstance(message, Residency):
            if self._residency is not None:
                self._residency.message = None
            self._residency = entry
        if isinstance(message, Reply):
            # Only directly after one another: the order within an attempt is kept.
            self._last_of[message.broker_epoch, message.op] = entry
        self._queue.append(entry)

    def _join(self, message: RunTokens) -> bool:
        entry = self._last_of.get((message.broker_epoch, message.op))
        if entry is None or not isinstance(entry.message, RunTokens):
            return False
        waiting = entry.message
        if len(waiting.text) + len(message.text) > JOIN_CHARS_MAX:
            return False
        if len(waiting.ids) + len(message.ids) > JOIN_IDS_MAX:
            return False
        entry.message = msgspec.structs.replace(
            waiting, text=waiting.text + message.text, ids=[*waiting.ids, *message.ids]
        )
        return True

    def first(self) -> Waiting | None:
        """The oldest message, still in the queue; None if there is none."""
        while self._queue and self._queue[0].message is None:
            self._queue.popleft()
        return self._queue[0] if self._queue else None

    def drop_first(self) -> None:
        """It has been sent, or is not to be sent."""
        entry = self._queue.popleft()
        if entry is self._residency:
            self._residency = None
        message = entry.message
        if isinstance(message, Reply):
            key = (message.broker_epoch, message.op)
            if self._last_of.get(key) is entry:
                del self._last_of[key]

    def clear(self) -> None:
        """The session is over."""
        self._queue.clear()
        self._last_of.clear()
        self._residency = None
