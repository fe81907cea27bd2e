"""The memory sampler of a worker that serves: what a sample shows is acted on.

On the engine thread, between two moves, like the samples themselves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sized
from typing import Protocol

import msgspec

from vram_conductor.protocol.errors import Unavailable
from vram_conductor.protocol.values import DeviceInfo, Memory
from vram_conductor.worker.growth import Growth
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.unexplained import Unexplained

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """Memory of the device."""

    def info(self) -> DeviceInfo: ...
    def sample(self, own_bytes: int) -> Memory: ...


class Measures(Sampler, Protocol):
    """``vram.NvmlSampler``, ``capacity.CapacitySampler`` or ``memory.CpuSampler``."""

    told_bytes: int | None


class Gauge:
    """A :class:`Sampler` over another one.

    Args:
        add_base: takes what the process took for itself since it started.
        idle: whether no job runs or waits.
        pinned: host memory that the device can reach, in bytes.
        clock: monotonic, in nanoseconds.

    Attributes:
        worn: the process keeps memory that nobody can account for, and nothing runs: it should be
            replaced.
    """

    def __init__(
        self,
        sampler: Measures,
        unexplained: Unexplained,
        add_base: Callable[[int], None],
        idle: Callable[[], bool],
        pinned: Callable[[], int],
        clock: Callable[[], int],
    ) -> None:
        self._sampler = sampler
        self._cuda = sampler.info().kind == "cuda"
        self._unexplained = unexplained
        self._add_base = add_base
        self._idle = idle
        self._pinned = pinned
        self._clock = clock
        self._last: tuple[Memory, int] | None = None
        self.worn = False

    def info(self) -> DeviceInfo:
        """The device as READY reports it."""
        return self._sampler.info()

    def sample(self, own_bytes: int) -> Memory:
        """Sample now; ``own_bytes``: what the worker counts, the base included.

        Where NVML fails for once, the last sample as it has aged: nothing is admitted on an old
        one.

        Raises:
            Unavailable: ``gpu_lost``; and whatever fails at the first sample.
        """
        now_ns = self._clock()
        try:
            memory = self._sampler.sample(own_bytes)
        except Unavailable as error:
            if self._last is None or error.reason == "gpu_lost":
                raise
            log.warning("no memory sample: %s", error.info.message)
            memory, taken_ns = self._last
            return msgspec.structs.replace(memory, age_ms=(now_ns - taken_ns) // 1_000_000)
        if self._cuda:
            memory = self._judge(own_bytes, memory, now_ns)
        self._last = memory, now_ns
        return memory

    def _judge(self, own_bytes: int, memory: Memory, now_ns: int) -> Memory:
        """The sample with what nobody can account for among what others use: it cannot be
        promised to anybody."""
        verdict = self._unexplained.observe(
            own_bytes,
            memory.used_bytes,
            self._sampler.told_bytes,
            now_ns,
            idle=self._idle(),
            pinned_bytes=self._pinned(),
        )
        if verdict.drift_bytes:
            self._add_base(verdict.drift_bytes)
        if verdict.recycle and not self.worn:
            log.error(
                "%d bytes of the device are in use by this process and belong to nothing that it "
                "knows of: a new one will take over",
                verdict.unexplained_bytes,
            )
        self.worn = verdict.recycle
        rest = 0 if self._sampler.told_bytes is None else verdict.unexplained_bytes
        return msgspec.structs.replace(
            memory,
            own_bytes=memory.own_bytes - rest,
            foreign_bytes=memory.foreign_bytes + rest,
        )


def watch(
    sampler: Measures, residency: Residency, jobs: Sized, arenas_pinned: Callable[[], int]
) -> Gauge:
    """The gauge of a worker. ``arenas_pinned``: bytes of parked states that are pinned.

    On a GPU the base counts from now on with what it may grow by.
    """
    growth = Growth(residency.base_bytes)

    def add_base(size: int) -> None:
        nonlocal growth
        growth = growth.grown(size)
        residency.base_bytes = growth.booked_bytes
        residency.reserve_bytes = growth.reserve_bytes
        residency.revision += 1

    if sampler.info().kind == "cuda":
        add_base(0)

    def pinned() -> int:
        return arenas_pinned() + sum(item.lent_bytes for item in residency.weights.values())

    return Gauge(sampler, Unexplained(), add_base, lambda: not len(jobs), pinned, time.monotonic_ns)
