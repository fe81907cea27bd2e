"""What a worker says of itself to the broker."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Literal

from vram_conductor.protocol import limits, resume, structure
from vram_conductor.protocol.commands import Parked, Ready
from vram_conductor.protocol.values import DeviceInfo, Memory


@dataclass(frozen=True)
class Identity:
    """What READY says about this process and does not change."""

    worker_epoch: int
    version: str
    build: str
    base_bytes: int
    host_total_bytes: int
    mechanism_note: str
    mechanism: Literal["vmm-sleep", "state-swap"] = "state-swap"

    def ready(
        self, device: DeviceInfo, memory: Memory, parked: list[Parked], base_bytes: int
    ) -> Ready:
        """READY with what changes. ``base_bytes`` may have grown since the start: a second READY
        must not admit on less."""
        host = socket.gethostname()
        return Ready(
            v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR),
            worker=f"{device.device}@{host}",
            worker_epoch=self.worker_epoch,
            pid=os.getpid(),
            features=[structure.FEATURE, resume.FEATURE],
            host=host,
            version=self.version,
            build=self.build,
            device=device,
            memory=memory,
            base_bytes=base_bytes,
            mechanism=self.mechanism,
            mechanism_note=self.mechanism_note,
            parked=parked,
            host_total_bytes=self.host_total_bytes,
        )
