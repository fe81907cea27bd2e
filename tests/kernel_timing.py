"""How long kernels take on the device itself, without what the host needs to launch them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from vram_conductor.worker.pipeline.gpu import DeviceMemory, Gpu, Launch

REPEATS = 15


class KernelTimer:
    """Device memory to launch kernels on, and their times. Zeroed: a kernel's time does not depend
    on the values."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._stream = gpu.stream()
        self._events = [gpu.event(timed=True) for _ in range(2)]
        self._held: list[DeviceMemory] = []

    def memory(self, n_bytes: int) -> int:
        """The address of ``n_bytes`` that stay until :meth:`close`."""
        memory = self.gpu.allocate(n_bytes)
        self._held.append(memory)
        self.gpu.fill(memory.address, 0, n_bytes, self._stream)
        return memory.address

    def upload(self, array: NDArray[Any]) -> int:
        """The address of a copy of a contiguous array, which stays until :meth:`close`."""
        address = self.memory(array.nbytes)
        self.gpu.copy_to_device(address, array, self._stream)
        self._stream.synchronise()
        return address

    def ms(self, launches: Sequence[Launch]) -> float:
        """Of one launch, on average, when all of them follow one another; the median of several
        such rounds. Give so many that they take milliseconds together."""
        return statistics.median(self._round(launches) for _ in range(REPEATS)) / len(launches)

    def fill_bytes_per_s(self, n_bytes: int) -> float:
        """How fast the device writes its memory: what any kernel can be compared with."""
        address = self.memory(n_bytes)
        rounds: list[float] = []
        for _ in range(REPEATS):
            self._events[0].record(self._stream)
            self.gpu.fill(address, 1, n_bytes, self._stream)
            rounds.append(self._ms())
        return n_bytes / statistics.median(rounds) * 1e3

    def close(self) -> None:
        self._stream.synchronise()
        for memory in self._held:
            memory.free()
        for event in self._events:
            event.close()
        self._stream.close()

    def _round(self, launches: Sequence[Launch]) -> float:
        self._events[0].record(self._stream)
        for launch in launches:
            launch.on(self._stream)
        return self._ms()

    def _ms(self) -> float:
        self._events[1].record(self._stream)
        self._events[1].synchronise()
        return self._events[1].ms_since(self._events[0])
