"""Memory of the device beyond the CUDA context, for benches; nothing on cpu."""

from __future__ import annotations

import os
from collections.abc import Callable

from vram_conductor.worker.vram import NvmlSampler


class BenchMemory:
    """By NVML. Narrows this process to the GPU that is meant: NVML and CUDA may number them
    differently.

    Args:
        device: ``cpu`` or ``cuda:N``.
        make_context: creates the CUDA context, whose half gigabyte is no model's.

    Attributes:
        device: as this process sees it from now on.
        name: of the GPU; empty on cpu.
        base_bytes: of the context.

    Raises:
        ConductorError: ``no_driver``, ``no_device``, ``nvml_missing`` …
    """

    def __init__(self, device: str, make_context: Callable[[], object] | None = None) -> None:
        self.device, self.name, self.base_bytes = device, "", 0
        self._sampler: NvmlSampler | None = None
        if not device.startswith("cuda"):
            return
        self._sampler = NvmlSampler(device)
        self.name = self._sampler.info().name
        os.environ["CUDA_VISIBLE_DEVICES"] = self._sampler.uuid
        self.device = "cuda:0"
        before = self._used()
        # Kept: the context must live as long as something is compared with it.
        self._context = (make_context or _cupy_context)()
        self._start = self._used()
        self.base_bytes = self._start - before

    def grown_bytes(self) -> int | None:
        """In use beyond the context; None on cpu."""
        return None if self._sampler is None else self._used() - self._start

    def _used(self) -> int:
        assert self._sampler is not None
        return self._sampler.sample(0).used_bytes

    def __enter__(self) -> BenchMemory:
        return self

    def __exit__(self, *error: object) -> None:
        if self._sampler is not None:
            self._sampler.close()


def _cupy_context() -> object:
    from vram_conductor.worker.pipeline.cuda import Cuda

    return Cuda(0)
