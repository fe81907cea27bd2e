"""Which unit travels into which slot, and when, so that transfers hide behind computation. *Pure.*

Units (layers, pieces of the output head) are computed in order, pass after pass. Resident units
stay on the device; each other one travels once per pass. Slots are used in turn: the k-th transfer
goes into slot k mod ``slots`` and follows the computation that read the slot before. What a pass
transfers does not depend on what the one before it computed, so the first units of the next pass
travel while the last ones of this pass compute.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vram_conductor.worker.pipeline.streams import Span, Stream


@dataclass(frozen=True)
class Step:
    """One thing to put on a stream.

    Attributes:
        kind: the stream.
        unit: whose transfer or computation it is.
        slot: where its bytes go to or are; None: it is resident.
        at_pass: counts passes from 0; a transfer may belong to the pass after the current one.
    """

    kind: Stream
    unit: int
    slot: int | None
    at_pass: int


class Schedule:
    """The steps of one pass after the other; knows what is in which slot across passes.

    Args:
        n_units: units of a pass, at least 1.
        slots: buffers for units that travel, at least 1; nothing overlaps with only one.
        resident: units that never travel.
    """

    def __init__(self, n_units: int, slots: int, resident: Collection[int] = ()) -> None:
        assert n_units >= 1
        assert slots >= 1
        assert all(0 <= unit < n_units for unit in resident)
        self.n_units = n_units
        self.slots = slots
        self.streamed = tuple(unit for unit in range(n_units) if unit not in set(resident))
        self.restart()

    def restart(self) -> None:
        """Forget what is in the slots: the next pass begins with empty ones, as pass 0."""
        self._at_pass = 0
        # Of streamed units, over all passes.
        self._transferred = 0
        self._computed: int = 0

    def next_pass(self, ahead: bool = True) -> list[Step]:
        """The next pass, in the order in which the steps are to be put on the streams.

        Args:
            ahead: fill slots that become free with the first units of the pass after it.
        """
        steps: list[Step] = []
        end = None if ahead else (self._at_pass + 1) * len(self.streamed)
        self._fill(steps, end)
        for unit in range(self.n_units):
            slot = self._computed % self.slots if self._is_next(unit) else None
            steps.append(Step("compute", unit, slot, self._at_pass))
            if slot is not None:
                self._computed += 1
                self._fill(steps, end)
        self._at_pass += 1
        return steps

    def serial_pass(self) -> list[Step]:
        """A pass in which each unit travels right before it is computed, through the same slots.
        Nothing may be ahead."""
        assert self._transferred == self._computed
        steps: list[Step] = []
        for unit in range(self.n_units):
            slot = None
            if self._is_next(unit):
                self._fill(steps, self._computed + 1)
                slot = self._computed % self.slots
                self._computed += 1
            steps.append(Step("compute", unit, slot, self._at_pass))
        self._at_pass += 1
        return steps

    def _is_next(self, unit: int) -> bool:
        """Whether the unit's bytes are in the slot whose turn it is (else it is resident)."""
        return bool(self.streamed) and self.streamed[self._computed % len(self.streamed)] == unit

    def _fill(self, steps: list[Step], end: int | None) -> None:
        """Transfers into every slot that is free, up to the ``end``-th of all."""
        count = len(self.streamed)
        limit = self._computed + (self.slots if count else 0)
        for at in range(self._transferred, limit if end is None else min(limit, end)):
            steps.append(Step("transfer", self.streamed[at % count], at % self.slots, at // count))
            self._transferred = at + 1


def makespan_ms(spans: Sequence[Span]) -> float:
    """From the first start to the last end; 0 for none."""
    if not spans:
        return 0.0
    return max(span.end_ms for span in spans) - min(span.start_ms for span in spans)


def bound(transfer_ms: float, compute_ms: float) -> float:
    """Largest speedup over the serial schedule that any overlap can reach: (T + C) / max(T, C).

    Args:
        transfer_ms, compute_ms: of a whole pass, alone. 1.0 if both are 0.
    """
    longer_ms = max(transfer_ms, compute_ms)
    return (transfer_ms + compute_ms) / longer_ms if longer_ms else 1.0


def single_pass_ms(transfer_ms: Sequence[float], compute_ms: Sequence[float]) -> float:
    """Shortest possible pass that begins with empty slots: the first transfer and the last
    computation hide behind nothing.

    It is the makespan of a flow shop with two machines and a fixed order of jobs (S. M. Johnson,
    1954): the largest sum of transfers up to some unit and computations from that unit on. For
    ``N`` equal units, ``(N - 1) * max(t, c) + t + c``. Two slots reach it if all units are alike.

    Args:
        transfer_ms, compute_ms: per unit; 0 for the transfer of a resident one.
    """
    filled_ms, done_ms = 0.0, 0.0
    for transfer, compute in zip(transfer_ms, compute_ms, strict=True):
        filled_ms += transfer
        done_ms = max(done_ms, filled_ms) + compute
    return done_ms
