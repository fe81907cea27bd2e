"""A :class:`vram_conductor.worker.pipeline.gpu.Gpu` on the CPU, for tests.

What a stream is given is not done at once but when somebody waits, and then in an order drawn from
a seed: any that the streams and events allow. A forgotten wait shows. What a stream reads from or
writes to pinned host memory it does then, too; other host memory is read and written at once, as
CUDA does it. Device memory is poisoned, and what is outside it cannot be touched.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cuda_on_cpu.fenced import FencedMemory
from cuda_on_cpu.kernels import KernelError, Kernels, compile_kernels
from numpy.typing import NDArray

from vram_conductor.protocol.errors import Internal, ResourceExhausted
from vram_conductor.worker.pipeline.gpu import Argument, Event, Module, Size, Stream


class EmulatedCuda:
    """One device.

    Attributes:
        allocated_bytes: in use now.
        launches: how many kernels ran.

    Args:
        folder: where compiled kernels are kept.
        total_bytes: what there is to allocate.
        seed: of the order in which streams go on. With an odd one nothing is done before somebody
            waits; with an even one some of it is whenever somebody looks.
    """

    def __init__(self, folder: Path, total_bytes: int = 1 << 30, seed: int = 0) -> None:
        self.name = "CPU"
        self.capability: tuple[int, int] = (9, 0)
        self.multiprocessors = 4
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        self.launches = 0
        self.folder = folder
        self._random = random.Random(seed)
        self._lazy = seed % 2 == 1
        self._streams: list[EmulatedStream] = []
        self._pinned: list[EmulatedPinned] = []

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.allocated_bytes

    def allocate(self, n_bytes: int) -> EmulatedMemory:
        if n_bytes > self.free_bytes:
            raise ResourceExhausted(
                "device_memory_short",
                f"{n_bytes} bytes are needed, {self.free_bytes} of {self.total_bytes} are free",
                need_bytes=n_bytes,
                free_bytes=self.free_bytes,
                total_bytes=self.total_bytes,
            )
        return EmulatedMemory(self, n_bytes)

    def pinned(self, n_bytes: int) -> EmulatedPinned:
        self._pinned.append(EmulatedPinned(n_bytes))
        return self._pinned[-1]

    def stream(self) -> EmulatedStream:
        self._streams.append(EmulatedStream(self))
        return self._streams[-1]

    def event(self, timed: bool = False) -> EmulatedEvent:
        return EmulatedEvent(self, timed)

    def copy_to_device(self, address: int, array: NDArray[Any], stream: Stream) -> None:
        assert array.flags.c_contiguous
        source, n_bytes = array.ctypes.data, array.nbytes
        if self._is_pinned(array):
            _own(stream).put(lambda: ctypes.memmove(address, source, n_bytes))
        else:
            data = array.tobytes()
            _own(stream).put(lambda: ctypes.memmove(address, data, n_bytes))

    def copy_to_host(self, array: NDArray[Any], address: int, stream: Stream) -> None:
        assert array.flags.c_contiguous
        target, n_bytes = array.ctypes.data, array.nbytes
        _own(stream).put(lambda: ctypes.memmove(target, address, n_bytes))
        if not self._is_pinned(array):
            stream.synchronise()

    def fill(self, address: int, value: int, n_bytes: int, stream: Stream) -> None:
        _own(stream).put(lambda: ctypes.memset(address, value, n_bytes))

    def module(self, source: str) -> EmulatedModule:
        return EmulatedModule(self, compile_kernels(source, self.folder))

    def close(self) -> None:
        assert not self.allocated_bytes, "device memory was left behind"
        assert not any(pinned.array.size for pinned in self._pinned), "pinned memory was left"

    def run_until(self, done: Callable[[], bool]) -> None:
        """Go on with any stream that can, until ``done``."""
        while not done():
            ready = [stream for stream in self._streams if stream.can_go_on]
            assert ready, "every stream waits for another"
            self._random.choice(ready).go_on()

    def run_some(self) -> None:
        """Somebody looks: some of what can be done is."""
        if self._lazy:
            return
        for _ in range(self._random.randrange(4)):
            ready = [stream for stream in self._streams if stream.can_go_on]
            if ready:
                self._random.choice(ready).go_on()

    def _is_pinned(self, array: NDArray[Any]) -> bool:
        return any(np.may_share_memory(array, pinned.array) for pinned in self._pinned)


class EmulatedMemory:
    def __init__(self, gpu: EmulatedCuda, n_bytes: int) -> None:
        self._gpu = gpu
        self._memory = FencedMemory(n_bytes)
        self.address = self._memory.address
        self.n_bytes = n_bytes
        gpu.allocated_bytes += n_bytes

    def free(self) -> None:
        if self.address:
            self.address = 0
            self._memory.free()
            self._gpu.allocated_bytes -= self.n_bytes


class EmulatedPinned:
    def __init__(self, n_bytes: int) -> None:
        self.array = np.zeros(n_bytes, np.uint8)

    def free(self) -> None:
        self.array = np.empty(0, np.uint8)


class EmulatedStream:
    """A queue of things to do; a wait is something that cannot be done yet."""

    handle = 0

    def __init__(self, gpu: EmulatedCuda) -> None:
        self._gpu = gpu
        self._todo: deque[tuple[Callable[[], object], Callable[[], bool]]] = deque()

    def put(self, work: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self._todo.append((work, ready))

    @property
    def can_go_on(self) -> bool:
        return bool(self._todo) and self._todo[0][1]()

    def go_on(self) -> None:
        work, _ = self._todo.popleft()
        work()

    def wait(self, event: Event) -> None:
        assert isinstance(event, EmulatedEvent)
        stands_for = event.recorded
        self.put(lambda: None, lambda: event.reached >= stands_for)

    def synchronise(self) -> None:
        self._gpu.run_until(lambda: not self._todo)

    def close(self) -> None:
        assert not self._todo


class EmulatedEvent:
    """``recorded`` and ``reached`` count records: asked for, and come to by the stream."""

    handle = 0

    def __init__(self, gpu: EmulatedCuda, timed: bool) -> None:
        self._gpu = gpu
        self._timed = timed
        self.recorded = self.reached = 0
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached = max(self.reached, number)
            self.at_s = time.perf_counter()

        _own(stream).put(reach)

    def done(self) -> bool:
        self._gpu.run_some()
        return self.reached == self.recorded

    def synchronise(self) -> None:
        self._gpu.run_until(lambda: self.reached == self.recorded)

    def ms_since(self, earlier: Event) -> float:
        assert isinstance(earlier, EmulatedEvent)
        assert self._timed
        assert earlier._timed
        assert self.reached == self.recorded
        assert earlier.reached == earlier.recorded
        return (self.at_s - earlier.at_s) * 1e3

    def close(self) -> None:
        pass


class EmulatedModule(Module):
    def __init__(self, gpu: EmulatedCuda, kernels: Kernels) -> None:
        self._gpu = gpu
        self._kernels = kernels

    def prepare(
        self, name: str, grid: Size, block: Size, args: Sequence[Argument], shared_bytes: int = 0
    ) -> EmulatedLaunch:
        if name not in self._kernels.names:
            raise Internal("cuda_failed", f"no kernel {name}")

        def run() -> None:
            self._gpu.launches += 1
            try:
                self._kernels.launch(name, grid, block, args, shared_bytes)
            except KernelError as error:
                raise Internal("cuda_failed", str(error)) from None

        return EmulatedLaunch(run)


class EmulatedLaunch:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def on(self, stream: Stream) -> None:
        _own(stream).put(self._run)


def _own(stream: Stream) -> EmulatedStream:
    assert isinstance(stream, EmulatedStream)
    return stream
