"""Kernels launched on whatever GPU there is: the CPU's stand-in in tests/worker, a real one in
tests/gpu. A scene is a class of tests that take ``bench``; both folders inherit from it.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vram_conductor.worker.pipeline.gpu import DeviceMemory, Gpu, Module
from vram_conductor.worker.pipeline.launch_geometry import Geometry

SEED = int(os.environ.get("VRAM_CONDUCTOR_TEST_SEED", "20240607"))
"""Printed by pytest's header."""

GUARD_BYTES = 4096
"""Before and behind every array, all 0xFF: a NaN in each float format, -1 as an integer."""

UNIT_ALIGNMENT = 256
"""A kernel may read beyond an array up to this alignment: a unit's tensors are so far apart."""

Array = NDArray[Any]
Argument = np.generic | Array | None


def poisoned(*shape: int, dtype: type[np.floating[Any]] = np.float32) -> NDArray[Any]:
    """An output in which every value that a kernel does not write is seen: NaN."""
    return np.full(shape, np.nan, dtype)


class KernelBench:
    """Compiles and launches kernels on ``gpu``, on arrays between guards.

    Args:
        guard_bytes: 0 where the device itself sees what is read or written outside its memory.
    """

    def __init__(self, gpu: Gpu, guard_bytes: int = GUARD_BYTES) -> None:
        self.gpu = gpu
        self._guard_bytes = guard_bytes
        self._stream = gpu.stream()
        self._modules: dict[str, Module] = {}

    def launch(self, source: str, name: str, geometry: Geometry, *arguments: Argument) -> None:
        """Run it to its end; arrays then hold what the kernel made of them.

        An argument that is the same array as another shares its device memory. None is null.
        """
        held: dict[int, tuple[Array, DeviceMemory]] = {}
        passed: list[int | np.generic] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                if id(argument) not in held:
                    held[id(argument)] = argument, self._guarded(argument)
                passed.append(held[id(argument)][1].address + self._guard_bytes)
            else:
                passed.append(0 if argument is None else argument)
        if source not in self._modules:
            self._modules[source] = self.gpu.module(source)
        self._modules[source].launch(
            name, geometry.grid, geometry.block, passed, self._stream, geometry.shared_bytes
        )
        for array, memory in held.values():
            self._take_back(array, memory)

    def close(self) -> None:
        self._stream.close()

    def _guarded(self, array: Array) -> DeviceMemory:
        aligned = -(-array.nbytes // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
        memory = self.gpu.allocate(aligned + 2 * self._guard_bytes)
        self.gpu.fill(memory.address, 0xFF, memory.n_bytes, self._stream)
        if array.nbytes:
            self.gpu.copy_to_device(memory.address + self._guard_bytes, array, self._stream)
        return memory

    def _take_back(self, array: Array, memory: DeviceMemory) -> None:
        found = np.empty(memory.n_bytes, np.uint8)
        self.gpu.copy_to_host(found, memory.address, self._stream)
        self._stream.synchronise()
        memory.free()
        start, end = self._guard_bytes, self._guard_bytes + array.nbytes
        array[...] = found[start:end].view(array.dtype).reshape(array.shape)
        outside = np.flatnonzero(np.concatenate((found[:start], found[end:])) != 0xFF)
        assert not outside.size, f"written outside an array of {array.shape}: at {outside[:8]}"
