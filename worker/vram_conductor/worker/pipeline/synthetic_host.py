"""The synthetic payload on a host without a GPU: a memory-mapped file, and buffers in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.stream_host import HostStreams
from vram_conductor.worker.pipeline.synthetic import PARTS, Synthetic


class SyntheticHost:
    """Units in a file, streams, and a place for the results.

    Attributes:
        streams: that bring the units.

    Args:
        file: open for reading and writing, with room for all units; it is not closed.
        slots: buffers.
    """

    def __init__(self, file: BinaryIO, payload: Synthetic, slots: int) -> None:
        shape = (payload.n_units, payload.unit_bytes)
        written = np.memmap(file, np.uint8, "r+", shape=shape)
        for unit in range(payload.n_units):
            payload.fill(unit, written[unit])
        # Else it would be written back while something is measured.
        written.flush()
        written_bytes = written.size
        del written
        self._data: NDArray[np.uint8] = np.memmap(file, np.uint8, "r", shape=written_bytes)
        self.streams = HostStreams(self._copy, slots, payload.unit_bytes)
        self.lay_out(payload)

    def lay_out(self, payload: Synthetic) -> None:
        """Divide the same bytes, or some of them, into other units, no larger than those at first.
        The streams are idle."""
        self._payload = payload
        shape = (payload.n_units, payload.unit_bytes)
        self._units = self._data[: payload.n_units * payload.unit_bytes].reshape(shape)
        self._before = [payload.before(data) for data in self._units]
        self._results = np.empty((payload.n_units, PARTS, 2), np.float32)
        self.poison()

    def iterate(self, iterations: int) -> None:
        """From now on, so many iterations; the streams are idle."""
        self._payload = replace(self._payload, iterations=iterations)

    def work(self, unit: int, slot: Any) -> None:
        """Compute a unit that is in ``slot``; for :meth:`Pipeline.run`."""
        self._results[unit] = self._payload.compute(slot)

    def poison(self) -> None:
        """Forget all results: they are no numbers until they are computed again."""
        self._results.fill(np.nan)

    def check(self) -> None:
        """Compare all results with what is right.

        Raises:
            DataLoss: ``wrong_result``.
        """
        for unit, before in enumerate(self._before):
            self._payload.compare(unit, self._results[unit], before)

    def close(self) -> None:
        """Give everything back but the file."""
        self.streams.close()
        self._units = self._data = np.empty((0, 0), np.uint8)

    def _copy(self, unit: int, slot: NDArray[np.uint8]) -> None:
        np.copyto(slot[: self._payload.unit_bytes], self._units[unit])
