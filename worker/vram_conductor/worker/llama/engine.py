"""The engine of one device."""

from __future__ import annotations

import logging
from typing import Literal

from vram_conductor.protocol.errors import FailedPrecondition
from vram_conductor.worker.llama.calibration import calibrate
from vram_conductor.worker.llama.device import CudaDevice
from vram_conductor.worker.llama.estimate import LlamaEstimator
from vram_conductor.worker.llama.library import check_device, library
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.scratch import Gpu
from vram_conductor.worker.llama.vocabulary import Facts
from vram_conductor.worker.vmm.library import Vmm

log = logging.getLogger(__name__)

Mechanism = Literal["vmm-sleep", "state-swap"]


class LlamaEngine:
    """See ``engine.Engine``. On cuda, making it takes what the process takes for itself: the CUDA
    context and the first kernels. Nothing is loaded then."""

    def __init__(self, options: EngineOptions) -> None:
        check_device(options)
        self.options = options
        self.device_kind: Literal["cuda", "cpu"] = options.device_kind
        self.build: str = library().build
        self._device: CudaDevice | None = None
        gpu: Gpu | None = None
        if options.device_kind == "cuda":
            self._device = CudaDevice()
        self.mechanism: Mechanism
        self._vmm, self.mechanism, self.mechanism_note = choose_mechanism(options)
        if self._device is not None:
            gpu = calibrate(self._device, options, self._vmm)
        self.estimator = LlamaEstimator(options, gpu, self._vmm)
        self.estimator.start()
        self._facts: dict[str, Facts] = {}

    def load(self, path: str, name: str) -> LlamaModel:
        """Load weights."""
        model = LlamaModel(path, name, self.options, self._facts, self._vmm)
        if self._vmm is not None and not model.sleepable:
            log.warning("%s was not loaded into memory that can sleep; it will be unloaded", path)
        return model

    def used_bytes(self) -> int | None:
        """See ``engine.Engine``. Any thread."""
        return None if self._device is None else self._device.used_bytes()

    @property
    def total_bytes(self) -> int | None:
        """What the driver says the device has; None on cpu."""
        return None if self._device is None else self._device.total_bytes

    def close(self) -> None:
        """End the estimator's child process; models and pools are closed by their owner."""
        self.estimator.close()


def choose_mechanism(options: EngineOptions) -> tuple[Vmm | None, Mechanism, str]:
    """How device memory is given back here, and why so."""
    if options.device_kind == "cpu":
        return None, "state-swap", "states are copied between slots and shared memory"
    try:
        vmm = Vmm.open()
    except FailedPrecondition as error:
        note = f"{error.info.message}; pools are closed and weights are unloaded instead"
        log.warning("nothing can sleep: %s", note)
        return None, "state-swap", note
    return vmm, "vmm-sleep", "weights and pools sleep and wake at fixed addresses"
