"""When and with what a lease is renewed. *Pure.*"""

from __future__ import annotations

import msgspec

from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Lease

_PARTS = 3
"""A lease is renewed when so large a part of its time is over: two renewals may fail."""

_RETRY_S_MIN = 0.5


class Renewal:
    """The LEASE that is repeated, each time as a request of its own.

    Attributes:
        answer_ms: how long to wait for an answer.
    """

    def __init__(self, message: Lease, answer_ms: int) -> None:
        self._message = message
        self.answer_ms = answer_ms

    def message(self) -> Lease:
        return msgspec.structs.replace(self._message, rid=new_rid())

    def pause_s(self, *, failed: bool) -> float:
        """How long to wait before the next one, in seconds; less after one that ``failed``."""
        pause = self._message.ttl_s / _PARTS
        return max(_RETRY_S_MIN, pause / _PARTS) if failed else pause
