"""A pipeline that says what each of its computations found in its slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.gpu import Gpu
from vram_conductor.worker.pipeline.runner import Pipeline
from vram_conductor.worker.pipeline.schedule import Schedule
from vram_conductor.worker.pipeline.stream_cuda import CudaStreams

PASSES_MAX = 8
_ALIGNMENT = 256


class Rig:
    """A pipeline on one GPU, whose work copies the slot back to the host, on the compute stream.

    Attributes:
        units: what was computed, in order; at most ``PASSES_MAX`` passes of it.
    """

    def __init__(
        self, gpu: Gpu, n_units: int, slots: int, unit_bytes: int = 1000, *, timed: bool = False
    ) -> None:
        self.gpu = gpu
        pitch = -(-unit_bytes // _ALIGNMENT) * _ALIGNMENT
        payload = gpu.pinned(n_units * pitch)
        places = [(unit * pitch, unit_bytes) for unit in range(n_units)]
        for unit, (offset, size) in enumerate(places):
            payload.array[offset : offset + size] = unit + 1
        self.streams = CudaStreams(gpu, payload, places, slots, unit_bytes, timed=timed)
        self.pipeline = Pipeline(self.streams, Schedule(n_units, slots))
        self._landing = gpu.pinned(unit_bytes * n_units * PASSES_MAX)
        self._rows: NDArray[np.uint8] = self._landing.array.reshape(-1, unit_bytes)
        self.units: list[int] = []

    def work(self, unit: int, slot: Any) -> None:
        row = self._rows[len(self.units)]
        self.units.append(unit)
        self.gpu.copy_to_host(row, slot, self.streams.compute_stream)

    def seen(self) -> list[int]:
        """What each computation found; -1 where it was not one unit's bytes."""
        rows = self._rows[: len(self.units)]
        return [int(row[0]) if (row == row[0]).all() else -1 for row in rows]

    def close(self) -> None:
        self.streams.close()
        self._rows = np.empty((0, 0), np.uint8)
        self._landing.free()
