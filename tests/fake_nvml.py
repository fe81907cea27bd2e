"""A stand-in for ``pynvml``, with its real constants and error classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30


class FakeNvml:
    """Two GPUs of 8 GiB; everything else is taken from the real module (constants, errors)."""

    def __init__(self) -> None:
        self.used = [GIB, 2 * GIB]
        self.processes: list[SimpleNamespace] = []
        self.fail: dict[str, int] = {}
        self.open = 0
        self.versions: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _check(self, name: str) -> None:
        if name in self.fail:
            raise pynvml.NVMLError(self.fail[name])

    def nvmlInit(self) -> None:  # noqa: N802
        self._check("nvmlInit")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("nvmlDeviceGetCount")
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}{handle}aa"

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"Toy 8000"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int) -> SimpleNamespace:  # noqa: N802
        self._check("nvmlDeviceGetMemoryInfo")
        self.versions.append(version)
        total, reserved = 8 * GIB, GIB // 4
        used = self.used[handle]
        free = total - reserved - used
        return SimpleNamespace(total=total, reserved=reserved, used=used, free=free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        self._check("nvmlDeviceGetComputeRunningProcesses")
        return self.processes


def process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)
