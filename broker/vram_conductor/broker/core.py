"""The broker's core (*pure*): the only mutator of the broker's state.

``handle`` takes one event and returns the effects, in order. It reads no clock and does no IO.
"""

from __future__ import annotations

from vram_conductor.broker.effects import Effect
from vram_conductor.broker.events import Event
from vram_conductor.broker.restored import Restored
from vram_conductor.protocol.config import Config


class Core:
    """State of one broker process.

    Args:
        config: validated configuration; ``config.device`` lists the devices.
        broker_epoch: larger than that of every earlier broker; already in the journal.
        restored: the folded journal. The core takes it over; don't use it afterwards.
        now_ns: monotonic time, as in every later call.
    """

    def __init__(self, config: Config, broker_epoch: int, restored: Restored, now_ns: int) -> None:
        raise NotImplementedError

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """React to one event. Never raises for what peers send."""
        raise NotImplementedError

    def next_deadline_ns(self) -> int | None:
        """When to send a Tick at the latest; None if nothing is waiting for time to pass."""
        raise NotImplementedError
