"""A GPU without NVML: what was configured is what there is.

Some hosts have CUDA and no NVML (a container without the driver's utilities, an integrated GPU).
Nothing tells there what others use of the device before our context exists, nor what of it is
ours; so somebody has to say how much the worker may take (``capacity``), and answers for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.values import DeviceInfo, Memory
from vram_conductor.worker.vram import NvmlSampler, nvml_target

log = logging.getLogger(__name__)

BASE_BYTES_MAX = 1 << 30
"""Nobody's CUDA context is larger; what is in use beyond that at start is others'."""

_WITHOUT_NVML = ("nvml_missing", "no_driver")


class CapacitySampler:
    """Samples a GPU that has a configured capacity and no NVML.

    The driver tells how much of the device is free; what others use beyond the part that was not
    given to this worker counts as foreign, as on a cpu device.

    Attributes:
        capacity_bytes: as configured.
        target: the GPU's name for ``CUDA_VISIBLE_DEVICES``.
        told_bytes: None: nobody tells what this process uses.

    Raises:
        NotFound: ``no_such_device``.
    """

    told_bytes: int | None = None

    def __init__(
        self, device: str, capacity_bytes: int, env: Mapping[str, str] = os.environ
    ) -> None:
        self._device = device
        self.capacity_bytes = capacity_bytes
        self.target = str(nvml_target(device, env))
        self._used: Callable[[], int | None] = lambda: None
        self._others_room_bytes = 0

    def use(self, used_bytes: Callable[[], int | None], total_bytes: int | None) -> None:
        """From now on ask the driver: what is in use, of how much. It needs the CUDA context."""
        self._used = used_bytes
        self._others_room_bytes = max(0, (total_bytes or 0) - self.capacity_bytes)

    def info(self) -> DeviceInfo:
        """The device as READY reports it."""
        return DeviceInfo(
            device=self._device, kind="cuda", name="GPU", total_bytes=self.capacity_bytes
        )

    def measure_base(self) -> int:
        """What is in use once the CUDA context exists and nothing is loaded, at most
        ``BASE_BYTES_MAX``: it cannot be told from what others use."""
        return min(self._used() or 0, BASE_BYTES_MAX)

    def sample(self, own_bytes: int) -> Memory:
        """Sample now; ``own_bytes``: what the worker counts, the base included."""
        used = self._used()
        others = 0 if used is None else max(0, used - own_bytes)
        foreign = max(0, others - self._others_room_bytes)
        return Memory(used_bytes=own_bytes + foreign, own_bytes=own_bytes, foreign_bytes=foreign)

    def close(self) -> None:
        """Nothing to release."""


def open_gpu(
    device: str,
    capacity_bytes: int,
    nvml: object | None = None,
    env: Mapping[str, str] = os.environ,
) -> NvmlSampler | CapacitySampler:
    """What measures a GPU: NVML, or without it what was configured (``capacity_bytes``; 0: nothing
    was, and nothing is promised of a device that nobody can measure).

    Raises:
        ConductorError: as :class:`NvmlSampler`.
    """
    try:
        return NvmlSampler(device, nvml, env)
    except ConductorError as error:
        if error.reason not in _WITHOUT_NVML:
            raise
        if not capacity_bytes:
            raise type(error)(
                error.reason,
                f"{error.info.message}; where CUDA works and NVML does not, set capacity for "
                f"{device}: then that much is promised, unmeasured",
            ) from None
        log.warning(
            "%s is not measured (%s): %d bytes may be promised, as configured",
            device,
            error.info.message,
            capacity_bytes,
        )
        return CapacitySampler(device, capacity_bytes, env)
