"""Memory of a ``cpu`` device: how much of what it was promised do others use?

:func:`cpu_memory` and the parsers are pure; :class:`CpuSampler` reads the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from vram_conductor.protocol.errors import OutOfRange
from vram_conductor.protocol.values import DeviceInfo, Memory

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number just below 2^63."""


@dataclass(frozen=True)
class HostMemory:
    """The machine, or the container where its limit is the tighter one.

    Attributes:
        total_bytes: what may be used in all.
        available_bytes: what could still be had without swapping (caches count as available).
    """

    total_bytes: int
    available_bytes: int

    @property
    def used_bytes(self) -> int:
        return max(0, self.total_bytes - self.available_bytes)


def cpu_memory(
    host: HostMemory,
    *,
    capacity_bytes: int,
    host_cap_bytes: int,
    process_bytes: int,
    own_bytes: int,
) -> Memory:
    """One sample of a cpu device (design, section 5). *Pure.*

    ``foreign = max(0, others' use - (total - capacity - host cap))``: others may use what this
    device was not given; only what goes beyond eats into it.

    Args:
        host: the machine now.
        capacity_bytes, host_cap_bytes: what this device was given, for buffers and parked states.
        process_bytes: what of the machine's use is this worker's own.
        own_bytes: the buffers that this worker has allocated, by its own count.
    """
    others_bytes = max(0, host.used_bytes - process_bytes)
    free_for_others = host.total_bytes - capacity_bytes - host_cap_bytes
    foreign_bytes = max(0, others_bytes - free_for_others)
    return Memory(
        used_bytes=own_bytes + foreign_bytes, own_bytes=own_bytes, foreign_bytes=foreign_bytes
    )


def limited(host: HostMemory, limit_bytes: int, current_bytes: int, cache_bytes: int) -> HostMemory:
    """``host`` as seen from inside a cgroup with this limit and use. *Pure.*

    ``cache_bytes`` of its use could be dropped at once.
    """
    if limit_bytes >= host.total_bytes:
        return host
    inside = max(0, limit_bytes - max(0, current_bytes - cache_bytes))
    return HostMemory(limit_bytes, min(host.available_bytes, inside))


@dataclass(frozen=True)
class _Files:
    """Where one cgroup version keeps its numbers."""

    root: str
    limit: str
    current: str
    cache_key: str


_V2 = _Files("", "memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def cgroup_paths(proc_self_cgroup: str) -> list[tuple[_Files, PurePosixPath]]:
    """The memory cgroups that /proc/self/cgroup names. *Pure.*"""
    found: list[tuple[_Files, PurePosixPath]] = []
    for line in proc_self_cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if controllers == "":
            found.append((_V2, PurePosixPath(path)))
        elif "memory" in controllers.split(","):
            found.append((_V1, PurePosixPath(path)))
    return found


def read_cgroup(host: HostMemory, root: Path, proc_self_cgroup: str) -> HostMemory:
    """``host`` narrowed by every limit from the process's cgroup up to the root.

    A container often sees its own cgroup as the root, under a path that /proc does not know;
    the root is therefore always asked too.
    """
    for files, path in cgroup_paths(proc_self_cgroup):
        for folder in {path, *path.parents, PurePosixPath("/")}:
            at = root / files.root / folder.relative_to("/")
            limit = _number(at / files.limit)
            current = _number(at / files.current)
            if limit is not None and current is not None and limit < _UNLIMITED:
                host = limited(host, limit, current, _cache(at / "memory.stat", files.cache_key))
    return host


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number and no limit
        return None


def _cache(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key + " ")), 0)


def host_memory(cgroup_root: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """The machine's memory now, container limits included where they can be seen."""
    memory = psutil.virtual_memory()
    host = HostMemory(memory.total, memory.available)
    try:
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return host
    return read_cgroup(host, cgroup_root, groups)


class CpuSampler:
    """Samples a cpu device.

    Attributes:
        told_bytes: None: the system does not tell whose buffers its memory is.

    Args:
        device: its id.
        capacity_bytes, host_cap_bytes: see :func:`cpu_memory`; capacity 0 means all that is not
            the host cap.
        arena_bytes: asks what this worker's arenas take.
        host: reads the machine; replaced in tests.

    Raises:
        OutOfRange: ``capacity_beyond_memory``: more was configured than the machine has.
    """

    told_bytes: int | None = None

    def __init__(
        self,
        device: str,
        capacity_bytes: int,
        host_cap_bytes: int,
        arena_bytes: Callable[[], int],
        host: Callable[[], HostMemory] = host_memory,
    ) -> None:
        total_bytes = host().total_bytes
        self.capacity_bytes = capacity_bytes or max(0, total_bytes - host_cap_bytes)
        if self.capacity_bytes + host_cap_bytes > total_bytes or self.capacity_bytes == 0:
            raise OutOfRange(
                "capacity_beyond_memory",
                f"device {device} is to have {self.capacity_bytes} bytes and {host_cap_bytes} for "
                f"parked states; this machine (or container) has {total_bytes}: lower capacity or "
                "host_cap",
                capacity_bytes=self.capacity_bytes,
                host_cap_bytes=host_cap_bytes,
                total_bytes=total_bytes,
            )
        self._device = device
        self._host_cap_bytes = host_cap_bytes
        self._arena_bytes = arena_bytes
        self._host = host
        self._process = psutil.Process()

    def info(self) -> DeviceInfo:
        """The device as READY reports it."""
        return DeviceInfo(
            device=self._device, kind="cpu", name=_processor(), total_bytes=self.capacity_bytes
        )

    def measure_base(self) -> int:
        """A cpu device has no context that takes memory of its own: 0."""
        return 0

    def sample(self, own_bytes: int) -> Memory:
        """Sample now; ``own_bytes``: the buffers that are allocated, by the worker's own count."""
        usage = self._process.memory_info()
        # Mapped files (weights, arenas) are page cache or shared memory; arenas are added whole,
        # because what is parked and not mapped takes memory just as well.
        private_bytes = max(0, usage.rss - usage.shared)
        return cpu_memory(
            self._host(),
            capacity_bytes=self.capacity_bytes,
            host_cap_bytes=self._host_cap_bytes,
            process_bytes=private_bytes + self._arena_bytes(),
            own_bytes=own_bytes,
        )

    def close(self) -> None:
        """Nothing to release; the GPU's sampler has something."""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "cpu")
