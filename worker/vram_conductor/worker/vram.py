"""Memory of a GPU, by NVML. The only importer of ``pynvml``.

NVML counts the GPUs of the machine, CUDA those of ``CUDA_VISIBLE_DEVICES``; :func:`nvml_index`
translates. The driver's own reserve is not ours and not anybody's (``total - reserved`` is what
can be promised), hence memory info version 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from vram_conductor.protocol.errors import (
    ConductorError,
    FailedPrecondition,
    NotFound,
    Unavailable,
)
from vram_conductor.protocol.values import DeviceInfo, Memory


def load_nvml() -> ModuleType:
    """The ``pynvml`` module.

    Raises:
        FailedPrecondition: ``nvml_missing``: the package is not installed.
    """
    try:
        import pynvml
    except ImportError:
        raise FailedPrecondition(
            "nvml_missing",
            "GPU devices need nvidia-ml-py; in a clone of the project: make setup",
        ) from None
    return pynvml  # type: ignore[no-any-return]


def cuda_ordinal(device: str) -> int:
    """``cuda:1`` → 1, ``cuda`` → 0. *Pure.*

    Raises:
        NotFound: ``no_such_device``.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise NotFound("no_such_device", f"{device!r} is no GPU; write cuda:0, cuda:1 …")
    return int(number or 0)


def nvml_target(device: str, env: Mapping[str, str]) -> int | str:
    """What NVML calls ``device``: its index, or a UUID (or its beginning). *Pure.*

    Raises:
        NotFound: ``no_such_device``: hidden by ``CUDA_VISIBLE_DEVICES``.
    """
    ordinal = cuda_ordinal(device)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ordinal
    entries = [entry.strip() for entry in visible.split(",")]
    # CUDA stops at the first entry that it does not understand.
    usable: list[int | str] = []
    for entry in entries:
        if entry.isdecimal():
            usable.append(int(entry))
        elif entry.startswith(("GPU-", "MIG-")):
            usable.append(entry)
        else:
            break
    if ordinal >= len(usable):
        raise NotFound(
            "no_such_device",
            f"{device} is hidden: CUDA_VISIBLE_DEVICES={visible!r} shows {len(usable)} GPUs",
            visible=len(usable),
        )
    return usable[ordinal]


OVERHEAD_BYTES_MAX = 64 << 20
"""The driver keeps a little beside what it books for a process (9 MiB on an H200)."""


class NvmlSampler:
    """Samples one GPU.

    Attributes:
        capacity_bytes: what can be promised.
        told_bytes: what this process used at the last sample by NVML's own word, the driver's part
            included; None where NVML does not tell.

    Args:
        device: ``cuda:N``.
        nvml: the ``pynvml`` module (or a stand-in).
        env: the process environment.

    Raises:
        Unavailable: ``no_driver``, ``gpu_lost``, ``nvml_error``.
        FailedPrecondition: ``driver_mismatch``.
        NotFound: ``no_such_device``.
    """

    def __init__(
        self, device: str, nvml: Any | None = None, env: Mapping[str, str] = os.environ
    ) -> None:
        self._device = device
        self._nvml = nvml or load_nvml()
        target = nvml_target(device, env)
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise self._typed(error) from None
        try:
            self._handle = self._find(target)
            self._uuid = _text(self._nvml.nvmlDeviceGetUUID(self._handle))
            self._name = _text(self._nvml.nvmlDeviceGetName(self._handle))
            before = self._info()
        except self._nvml.NVMLError as error:
            self.close()
            raise self._typed(error) from None
        except ConductorError:
            self.close()
            raise
        self._used_before = int(before.used)
        self._overhead_bytes = 0
        # Before there is a CUDA context, whoever NVML calls by our process id is not we: it counts
        # processes of the machine, and this may be a container with its own ids.
        self._tells_own = self._own_entry() is None
        self.told_bytes: int | None = None
        self.capacity_bytes = int(before.total) - int(before.reserved)

    def _find(self, target: int | str) -> Any:
        nvml = self._nvml
        count = int(nvml.nvmlDeviceGetCount())
        if isinstance(target, int):
            if target >= count:
                raise NotFound(
                    "no_such_device",
                    f"{self._device}: this machine has {count} GPUs",
                    gpus=count,
                )
            return nvml.nvmlDeviceGetHandleByIndex(target)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        hits = [h for h in handles if _text(nvml.nvmlDeviceGetUUID(h)).startswith(target)]
        if len(hits) == 1:
            return hits[0]
        return nvml.nvmlDeviceGetHandleByUUID(target)

    def _info(self) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)

    @property
    def uuid(self) -> str:
        """For ``CUDA_VISIBLE_DEVICES`` of this process: CUDA and NVML then mean the same GPU."""
        return self._uuid

    def info(self) -> DeviceInfo:
        """The device as READY reports it."""
        info = self._read()
        return DeviceInfo(
            device=self._device,
            kind="cuda",
            name=self._name,
            total_bytes=int(info.total),
            reserved_bytes=int(info.reserved),
            uuid=self._uuid,
        )

    def measure_base(self) -> int:
        """Bytes that this process took since the sampler was made: call it once the CUDA context
        exists and nothing is loaded. Others' coming and going meanwhile would be counted, so
        NVML's own word about this process is preferred; what the device has in use beyond that
        is the driver's, for us, as long as it is little."""
        told = self._own_told()
        grown = max(0, int(self._read().used) - self._used_before)
        if told is None:
            return grown
        beyond = grown - told
        self._overhead_bytes = beyond if 0 <= beyond <= OVERHEAD_BYTES_MAX else 0
        return told + self._overhead_bytes

    def sample(self, own_bytes: int) -> Memory:
        """Sample now; ``own_bytes``: what the worker counts, the base included."""
        used = int(self._read().used)
        told = self._own_told()
        self.told_bytes = None if told is None else min(told + self._overhead_bytes, used)
        own = min(own_bytes, used) if self.told_bytes is None else self.told_bytes
        return Memory(used_bytes=used, own_bytes=own, foreign_bytes=used - own)

    def _read(self) -> Any:
        try:
            return self._info()
        except self._nvml.NVMLError as error:
            raise self._typed(error) from None

    def _own_told(self) -> int | None:
        """What NVML says that this process uses; None where it does not tell (containers with
        their own process ids, drivers without per-process accounting)."""
        return self._own_entry() if self._tells_own else None

    def _own_entry(self) -> int | None:
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        pid = os.getpid()
        own = [entry.usedGpuMemory for entry in processes if entry.pid == pid]
        return int(own[0]) if own and own[0] is not None else None

    def _typed(self, error: Any) -> ConductorError:
        nvml = self._nvml
        if error.value in (nvml.NVML_ERROR_DRIVER_NOT_LOADED, nvml.NVML_ERROR_LIBRARY_NOT_FOUND):
            return Unavailable(
                "no_driver",
                f"no NVIDIA driver here ({error}); install it, or run the container with GPUs "
                "(--gpus all), or use a device of kind cpu",
            )
        if error.value == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return FailedPrecondition(
                "driver_mismatch",
                "the NVIDIA driver was upgraded and the kernel still runs the old one: reboot, or "
                "unload and load the nvidia kernel modules",
            )
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return Unavailable("gpu_lost", f"{self._device} has fallen off the bus; reboot")
        return Unavailable("nvml_error", f"{self._device}: NVML says: {error}", nvml=error.value)

    def close(self) -> None:
        """Leave NVML. Idempotent enough: NVML counts its users."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            return


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
