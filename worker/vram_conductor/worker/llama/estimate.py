"""The engine's estimator: a child process for the first look, and for all of it on cpu."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.engine import Estimate
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.identity import model_files
from vram_conductor.worker.llama.isolated import DryRunProcess
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.partcheck import check_files
from vram_conductor.worker.llama.scratch import Gpu
from vram_conductor.worker.vmm.library import Vmm

RESULTS_MAX = 4096


class LlamaEstimator:
    """See ``engine.Estimator``. Thread-safe; callers wait for one another.

    On cuda the numbers need the device's backend, and a second process would cost a second CUDA
    context: there the child only proves that the file does not crash llama.cpp, and the dry run
    proper happens here.
    """

    def __init__(
        self, options: EngineOptions, gpu: Gpu | None = None, vmm: Vmm | None = None
    ) -> None:
        """``gpu``: on cuda, what scratch depends on. ``vmm``: see ``DryRunner``."""
        self._process = DryRunProcess(replace(options, device_kind="cpu"))
        self._local = DryRunner(options, gpu, vmm) if options.device_kind == "cuda" else None
        self._results: dict[tuple[str, PoolShape, int, int | None], Estimate] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the child ahead of the first estimate."""
        self._process.start()

    def estimate(
        self, path: str, name: str, shape: PoolShape, n_ctx: int, fit_bytes: int | None
    ) -> Estimate:
        """See ``engine.Estimator``; the same question again is answered from memory."""
        files = model_files(path)
        key = (files.id, shape, n_ctx, fit_bytes)
        with self._lock:
            found = self._results.get(key)
        if found is not None:
            info = msgspec.structs.replace(found.info, name=name, path=path)
            return replace(found, info=info, cached=True)
        check_files(files)
        if self._local is None:
            result = self._process.estimate(path, name, shape, n_ctx, fit_bytes)
        else:
            self._process.describe(path, name)
            result = self._local.estimate(path, name, shape, n_ctx, fit_bytes)
        with self._lock:
            if len(self._results) >= RESULTS_MAX:
                self._results.clear()
            self._results[key] = result
        return result

    def close(self) -> None:
        """End the child and free the dry models. Idempotent."""
        self._process.close()
        if self._local is not None:
            self._local.close()
