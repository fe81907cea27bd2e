"""What the pipeline needs of a GPU. *Pure.*

:class:`vram_conductor.worker.pipeline.cuda.Cuda` is the real one; the tests have one on the CPU.
Device memory is told by its address (int). What is given a stream happens in that stream's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Argument = int | np.generic
"""Of a kernel: a device address (int; 0 is null), or a scalar of exactly the parameter's type
(``np.int32``, ``np.float32`` …)."""

Size = tuple[int, ...]
"""Of a grid or a block: one to three numbers."""


class DeviceMemory(Protocol):
    """Bytes on the device, uninitialised, aligned to 256 at least.

    Attributes:
        address: 0 once freed.
        n_bytes: size.
    """

    address: int
    n_bytes: int

    def free(self) -> None:
        """Give it back; nothing may use it any more. May be called twice."""


class PinnedMemory(Protocol):
    """Host bytes that the device reads and writes by itself, while the host does other things.

    Attributes:
        array: the bytes, all 0 at first.
    """

    array: NDArray[np.uint8]

    def free(self) -> None:
        """Give it back; ``array`` must not be touched any more. May be called twice."""


class Event(Protocol):
    """A point in a stream.

    Attributes:
        handle: the driver's name of it.
    """

    handle: int

    def record(self, stream: Stream) -> None:
        """It stands for what ``stream`` was given until now, and for nothing earlier."""

    def done(self) -> bool:
        """Whether the stream has come so far."""
        ...

    def synchronise(self) -> None:
        """Wait for it."""

    def ms_since(self, earlier: Event) -> float:
        """Between two events that are timed and done, at about half a microsecond."""
        ...

    def close(self) -> None:
        """May be called twice."""


class Stream(Protocol):
    """Does what it is given in order.

    Attributes:
        handle: the driver's name of it.
    """

    handle: int

    def wait(self, event: Event) -> None:
        """What it is given from now on comes after what ``event`` stands for now."""

    def synchronise(self) -> None:
        """Wait until it is idle."""

    def close(self) -> None:
        """May be called twice. Idle streams only."""


class Launch(Protocol):
    """A kernel with its geometry and arguments, ready to be put on streams again and again."""

    def on(self, stream: Stream) -> None:
        """Put it on a stream."""


class Module(Protocol):
    """Compiled kernels."""

    def prepare(
        self,
        name: str,
        grid: Size,
        block: Size,
        args: Sequence[Argument],
        shared_bytes: int = 0,
    ) -> Launch:
        """A launch whose arguments are converted once.

        Args:
            name: an ``extern "C"`` kernel.
            shared_bytes: dynamic shared memory per block.

        Raises:
            Internal: ``cuda_failed``: no such kernel, or more shared memory than the device has.
        """
        ...

    def launch(
        self,
        name: str,
        grid: Size,
        block: Size,
        args: Sequence[Argument],
        stream: Stream,
        shared_bytes: int = 0,
    ) -> None:
        """:meth:`prepare` it, and put it on ``stream``."""
        self.prepare(name, grid, block, args, shared_bytes).on(stream)


class Gpu(Protocol):
    """One device. One thread uses it.

    Errors of the device itself are Internal ``cuda_failed``, of any call: CUDA tells them late.

    Attributes:
        name: the vendor's.
        capability: compute capability, (major, minor).
        multiprocessors: how many it has.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int

    @property
    def total_bytes(self) -> int:
        """Its memory, all of it."""
        ...

    @property
    def free_bytes(self) -> int:
        """What nobody uses now."""
        ...

    def allocate(self, n_bytes: int) -> DeviceMemory:
        """``n_bytes`` of the device, straight from the driver.

        Raises:
            ResourceExhausted: ``device_memory_short``.
        """
        ...

    def pinned(self, n_bytes: int) -> PinnedMemory:
        """``n_bytes`` of the host, page-locked.

        Raises:
            ResourceExhausted: ``host_memory_short``, ``pin_refused``.
        """
        ...

    def stream(self) -> Stream: ...

    def event(self, timed: bool = False) -> Event: ...

    def copy_to_device(self, address: int, array: NDArray[Any], stream: Stream) -> None:
        """A contiguous array's bytes to ``address``. Returns at once where the array is pinned: it
        must stay as it is until the stream has come so far."""

    def copy_to_host(self, array: NDArray[Any], address: int, stream: Stream) -> None:
        """``array.nbytes`` from ``address`` into a contiguous array. Where it is pinned, this
        returns at once: the bytes are there when the stream has come so far."""

    def fill(self, address: int, value: int, n_bytes: int, stream: Stream) -> None:
        """Set every byte to ``value`` (0 to 255)."""

    def module(self, source: str) -> Module:
        """Compile CUDA C++ without any headers.

        Raises:
            FailedPrecondition: ``nvrtc_missing``.
            Internal: ``kernel_compile_failed``: the compiler's words.
        """
        ...

    def close(self) -> None:
        """Everything that was made by it must be closed before."""
