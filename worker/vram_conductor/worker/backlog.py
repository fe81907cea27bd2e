"""Messages that wait for the socket, and those that may have to be sent again. *Pure.*

The engine never waits: what the socket does not take lies here. Output of one attempt that waits
is joined into one message, and of reports on residency only the newest stays, so a slow link
costs memory in proportion to the number of jobs and the length of their texts. Nothing else is
ever dropped while the session lasts.

In a session that can be resumed replies and reports are numbered as they leave, and kept until the
broker has confirmed them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from vram_conductor.protocol.commands import Reply, Residency, RunTokens
from vram_conductor.protocol.resume import Unconfirmed

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
        self._order: int | None = None
        self._unconfirmed: Unconfirmed[Waiting] = Unconfirmed()

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
        """The oldest message, numbered, still in the queue; None if there is none."""
        while self._queue and self._queue[0].message is None:
            self._queue.popleft()
        if not self._queue:
            return None
        entry = self._queue[0]
        if self._order is not None:
            message = entry.message
            if isinstance(message, Reply | Residency) and not message.order:
                self._order += 1
                entry.message = msgspec.structs.replace(message, order=self._order)
        return entry

    def drop_first(self, *, sent: bool = False) -> None:
        """It has been sent, or is not to be sent."""
        entry = self._queue.popleft()
        if entry is self._residency:
            self._residency = None
        message = entry.message
        if isinstance(message, Reply):
            key = (message.broker_epoch, message.op)
            if self._last_of.get(key) is entry:
                del self._last_of[key]
        if sent and isinstance(message, Reply | Residency) and message.order:
            self._unconfirmed.sent(message.order, entry)

    def begin(self, *, numbered: bool) -> None:
        """A session begins; ``numbered``: it can be resumed."""
        self.clear()
        self._order = 0 if numbered else None

    def confirm(self, order: int) -> None:
        """The broker has everything up to ``order``."""
        self._unconfirmed.confirm(order)

    def rewind(self, order: int) -> None:
        """The session goes on over another connection: what came after ``order`` leaves again,
        before anything else, as it was."""
        self._unconfirmed.confirm(order)
        self._queue.extendleft(reversed(self._unconfirmed.rest()))
        self._unconfirmed.clear()

    def clear(self) -> None:
        """The session is over."""
        self._queue.clear()
        self._last_of.clear()
        self._residency = None
        self._order = None
        self._unconfirmed.clear()
