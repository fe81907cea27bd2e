"""The engine of one device."""

from __future__ import annotations

from typing import Literal

from vram_conductor.worker.llama.estimate import LlamaEstimator
from vram_conductor.worker.llama.library import check_device, library
from vram_conductor.worker.llama.model import LlamaModel
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.vocabulary import Facts


class LlamaEngine:
    """See ``engine.Engine``."""

    def __init__(self, options: EngineOptions) -> None:
        check_device(options)
        self.options = options
        self.device_kind: Literal["cuda", "cpu"] = options.device_kind
        self.build: str = library().build
        self.mechanism: Literal["vmm-sleep", "state-swap"] = "state-swap"
        self.mechanism_note = "the device is not a GPU"
        self.estimator = LlamaEstimator(options)
        self.estimator.start()
        self._facts: dict[str, Facts] = {}

    def load(self, path: str, name: str) -> LlamaModel:
        """Load weights."""
        return LlamaModel(path, name, self.options, self._facts)

    def used_bytes(self) -> int | None:
        """See ``engine.Engine``."""
        return None

    def close(self) -> None:
        """End the estimator's child process; models and pools are closed by their owner."""
        self.estimator.close()
