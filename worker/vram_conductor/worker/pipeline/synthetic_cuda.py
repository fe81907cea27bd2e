"""The synthetic payload on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.gpu import DeviceMemory, Gpu, Launch
from vram_conductor.worker.pipeline.kernel_source import kernel_source
from vram_conductor.worker.pipeline.stream_cuda import CudaStreams
from vram_conductor.worker.pipeline.synthetic import PARTS, PIECE, STEP, Synthetic

THREADS = PIECE // 4
_ALIGNMENT = 256
_RESULT_BYTES = PARTS * 2 * 4


class SyntheticCuda:
    """Pinned units, streams, and a place on the device for the results.

    Attributes:
        streams: that bring the units.

    Args:
        slots: device buffers.
        timed: see :class:`CudaStreams`.

    Raises:
        ResourceExhausted: ``host_memory_short``, ``pin_refused``, ``device_memory_short``.
        FailedPrecondition: ``nvrtc_missing``.
    """

    def __init__(self, gpu: Gpu, payload: Synthetic, slots: int, *, timed: bool = True) -> None:
        self._gpu = gpu
        self._payload = payload
        self._module = gpu.module(kernel_source("synthetic.cu"))
        places = _places(payload)
        pinned = gpu.pinned(sum(places[-1]))
        self.streams = CudaStreams(gpu, pinned, places, slots, payload.unit_bytes, timed=timed)
        self._results: DeviceMemory | None = None
        try:
            with ThreadPoolExecutor() as pool:
                units = _units(pinned.array, places)
                list(pool.map(payload.fill, range(payload.n_units), units))
            self.lay_out(payload)
        except BaseException:
            self.close()
            raise

    def lay_out(self, payload: Synthetic) -> None:
        """Divide the same bytes, or some of them, into other units, no larger than those at first.
        The streams are idle.

        Raises:
            ResourceExhausted: ``device_memory_short``.
        """
        places = _places(payload)
        assert sum(places[-1]) <= self.streams.payload.array.nbytes
        self.streams.lay_out(places)
        if self._results is not None:
            self._results.free()
        self._results = self._gpu.allocate(payload.n_units * _RESULT_BYTES)
        with ThreadPoolExecutor() as pool:
            units = _units(self.streams.payload.array, places)
            self._before = list(pool.map(payload.before, units))
        self._payload = payload
        self.iterate(payload.iterations)

    def iterate(self, iterations: int) -> None:
        """From now on, so many iterations; the streams are idle."""
        self._payload = replace(self._payload, iterations=iterations)
        assert self._results is not None
        fours = self._payload.unit_bytes // 16
        self._launches: dict[tuple[int, int], Launch] = {
            (unit, address): self._module.prepare(
                "synthetic",
                (PARTS,),
                (THREADS,),
                (
                    address,
                    self._results.address + unit * _RESULT_BYTES,
                    np.int64(fours),
                    np.int32(iterations),
                    STEP,
                ),
            )
            for unit in range(self._payload.n_units)
            for address in map(self.streams.slot, range(self.streams.n_slots))
        }

    def work(self, unit: int, slot: Any) -> None:
        """Compute a unit that is in ``slot``; for :meth:`Pipeline.run`."""
        self._launches[unit, slot].on(self.streams.compute_stream)

    def poison(self) -> None:
        """Forget all results: they are no numbers until they are computed again."""
        assert self._results is not None
        stream = self.streams.compute_stream
        self._gpu.fill(self._results.address, 0xFF, self._results.n_bytes, stream)
        stream.synchronise()

    def check(self) -> None:
        """Compare all results with what is right.

        Raises:
            DataLoss: ``wrong_result``.
        """
        assert self._results is not None
        results = np.empty((self._payload.n_units, PARTS, 2), np.float32)
        self._gpu.copy_to_host(results, self._results.address, self.streams.compute_stream)
        self.streams.compute_stream.synchronise()
        for unit, before in enumerate(self._before):
            self._payload.compare(unit, results[unit], before)

    def close(self) -> None:
        """Give everything back."""
        self.streams.close()
        if self._results is not None:
            self._results.free()


def _places(payload: Synthetic) -> list[tuple[int, int]]:
    """Where units lie in host memory: (offset, bytes)."""
    pitch = -(-payload.unit_bytes // _ALIGNMENT) * _ALIGNMENT
    return [(unit * pitch, payload.unit_bytes) for unit in range(payload.n_units)]


def _units(data: NDArray[np.uint8], places: list[tuple[int, int]]) -> list[NDArray[np.uint8]]:
    return [data[start : start + size] for start, size in places]
