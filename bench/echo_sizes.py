"""What the echo worker says of itself and of models: any file is the same small model."""

from __future__ import annotations

import os
import platform
from typing import Any

from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Estimate, Ready
from vram_conductor.protocol.values import DeviceInfo, Memory, ModelInfo

MIB = 1 << 20
WEIGHTS_BYTES = 100 * MIB
CELL_BYTES = 16 * 1024
COMPUTE_BYTES = 4 * MIB
TOTAL_BYTES = 16 * 1024 * MIB


def ready(device: str, epoch: int) -> Ready:
    """The worker's introduction."""
    return Ready(
        v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR),
        worker=f"echo-{device}",
        worker_epoch=epoch,
        pid=os.getpid(),
        host=platform.node(),
        version="0",
        build="echo",
        device=DeviceInfo(device=device, kind="cpu", name="echo", total_bytes=TOTAL_BYTES),
        memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0),
        host_total_bytes=TOTAL_BYTES,
    )


def sizes(command: Estimate) -> dict[str, Any]:
    """The fields of the answer to an ESTIMATE."""
    fit = None
    if command.fit_bytes is not None:
        fit = max(0, command.fit_bytes - COMPUTE_BYTES) // CELL_BYTES // 256 * 256
    return {
        "model": ModelInfo(
            model=f"echo-{command.model}",
            name=command.model,
            path=f"/echo/{command.model}",
            file_bytes=WEIGHTS_BYTES,
            arch="echo",
            n_ctx_train=1 << 20,
            n_vocab=32_000,
            chat_template=True,
        ),
        "shape": command.shape,
        "weights_bytes": WEIGHTS_BYTES,
        "pool_bytes": command.shape.cells * CELL_BYTES + COMPUTE_BYTES,
        "kv_bytes": command.shape.cells * CELL_BYTES,
        "compute_bytes": COMPUTE_BYTES,
        "state_bytes": command.n_ctx * CELL_BYTES,
        "fit_cells": fit,
    }
