"""What a device must be able to do for the pipeline: two streams that wait for each other. *Pure.*

One stream carries units from the host into slots, the other computes on them. Each does what it
was given in order; across them only marks are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Stream = Literal["transfer", "compute"]


class Mark(Protocol):
    """Something that was put on a stream and will be done. Only the streams that made it look
    into it."""


@dataclass(frozen=True)
class Span:
    """When one unit was on one stream.

    Attributes:
        stream: which.
        unit: whose transfer or computation it was.
        start_ms, end_ms: on one clock for both streams, whose zero means nothing.
        at_pass: what the caller said.
    """

    stream: Stream
    unit: int
    start_ms: float
    end_ms: float
    at_pass: int = 0

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms


class Streams(Protocol):
    """The two streams of a device. One host thread gives them work.

    After an error nothing more of what was given is begun: :meth:`synchronise` says it, once, and
    then they can be used again. Nothing ever waits for what will not be done.

    Attributes:
        n_slots: device buffers that units travel into.
    """

    n_slots: int

    def slot(self, index: int) -> Any:
        """Where a slot's bytes are. cuda: the device address (int); host: NDArray[uint8]."""

    def transfer(self, unit: int, slot: int, after: Mark | None, *, at_pass: int = 0) -> Mark:
        """Bring a unit into a slot, on the transfer stream, once ``after`` (the computation that
        used the slot last) is done."""

    def compute(
        self, unit: int, work: Callable[[], None], after: Mark | None, *, at_pass: int = 0
    ) -> Mark:
        """Compute on the compute stream, once ``after`` (the unit's transfer) is done.

        ``work`` runs at once and puts kernels onto the stream (cuda), or runs in the compute
        thread (host); what it raises comes from here or from :meth:`synchronise`.
        """

    def wait(self, mark: Mark) -> None:
        """Wait until this is done; what comes after it goes on.

        Raises:
            Exception: as :meth:`synchronise`, after waiting like it.
        """

    def synchronise(self) -> None:
        """Wait until all that was given is done.

        Raises:
            Exception: the first that ``work`` or a transfer raised since the last call.
        """

    def spans(self) -> list[Span]:
        """What was done since the last call, each stream's in order; nothing where nothing is
        timed. Only after :meth:`synchronise`."""
        ...

    def close(self) -> None:
        """Wait for what has begun and give everything back. May be called twice."""
