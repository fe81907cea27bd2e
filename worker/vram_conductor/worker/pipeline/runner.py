"""Puts a schedule on streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vram_conductor.worker.pipeline.schedule import Schedule, Step
from vram_conductor.worker.pipeline.streams import Mark, Streams

Work = Callable[[int, Any], None]
"""``work(unit, slot)``: a unit's computation; ``slot`` as :meth:`Streams.slot` gives it, None for
a resident unit."""


class Pipeline:
    """Passes over all units, one after the other. One thread.

    After an error the slots count as empty, and the next pass begins anew.

    Args:
        streams: with as many slots as the schedule has.
    """

    def __init__(self, streams: Streams, schedule: Schedule) -> None:
        assert streams.n_slots == schedule.slots
        self.streams = streams
        self.schedule = schedule
        self._forget()

    def run(self, work: Work, *, ahead: bool = True) -> None:
        """Put one pass on the streams; :meth:`synchronise` waits for it.

        Args:
            ahead: begin with the transfers of the next pass, too.

        Raises:
            Exception: what ``work`` raised at once.
        """
        self._issue(self.schedule.next_pass(ahead), work)

    def run_serial(self, work: Work) -> None:
        """One pass in which nothing overlaps: transfer, synchronise, compute, synchronise, on the
        same memory. What was ahead is waited for and forgotten.

        Raises:
            Exception: what ``work`` or a transfer raised.
        """
        self.restart()
        for step in self.schedule.serial_pass():
            self._issue([step], work)
            self.synchronise()

    def synchronise(self) -> None:
        """Wait for all that was put on the streams.

        Raises:
            Exception: what ``work`` or a transfer raised.
        """
        try:
            self.streams.synchronise()
        except BaseException:
            self._forget()
            raise

    def restart(self) -> None:
        """Wait for everything; the next pass begins with empty slots.

        Raises:
            Exception: what ``work`` or a transfer raised.
        """
        self.synchronise()
        self._forget()

    def _forget(self) -> None:
        self.schedule.restart()
        self._filled: dict[int, Mark] = {}
        self._read: dict[int, Mark] = {}

    def _issue(self, steps: Iterable[Step], work: Work) -> None:
        try:
            for step in steps:
                self._put(step, work)
        except BaseException:
            # What was put before is still under way, in slots that will be filled again.
            try:
                self.streams.synchronise()
            finally:
                self._forget()
            raise

    def _put(self, step: Step, work: Work) -> None:
        streams, slot = self.streams, step.slot
        if slot is None:
            streams.compute(step.unit, partial(work, step.unit, None), None, at_pass=step.at_pass)
        elif step.kind == "transfer":
            after = self._read.get(slot)
            mark = streams.transfer(step.unit, slot, after, at_pass=step.at_pass)
            self._filled[slot] = mark
        else:
            job = partial(work, step.unit, streams.slot(slot))
            mark = streams.compute(step.unit, job, self._filled[slot], at_pass=step.at_pass)
            self._read[slot] = mark
