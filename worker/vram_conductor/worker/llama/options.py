"""What an engine is told about its device. *Pure*."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CUDA_UBATCH_TOKENS = 512
CPU_UBATCH_TOKENS = 64
"""Default micro-batches: a cancel waits for one, so they stay short where compute is slow."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings that hold for every model and pool of an engine.

    Attributes:
        device_kind: ``cuda`` or ``cpu``.
        device_index: index of the GPU as this process sees it; ignored on cpu.
        device_uuid: part of the estimates' cache key.
        threads: CPU threads for compute; 0 means every core this process may use.
        n_ubatch: micro-batch in tokens; 0 means the device kind's default. One
            ``Pool.decode`` takes at most this many tokens.
    """

    device_kind: Literal["cuda", "cpu"] = "cpu"
    device_index: int = 0
    device_uuid: str = ""
    threads: int = 0
    n_ubatch: int = 0

    @property
    def batch_tokens(self) -> int:
        """Most tokens of one ``Pool.decode``."""
        if self.n_ubatch:
            return self.n_ubatch
        return CUDA_UBATCH_TOKENS if self.device_kind == "cuda" else CPU_UBATCH_TOKENS
