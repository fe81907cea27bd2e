"""Loaded by every interpreter that finds this folder on its path: workers that are worn sooner, and
a card that gives nothing back.

``RECYCLE_MS``: so long a worker keeps what nobody can account for before it is replaced, at any
age; it would be seconds, and minutes of age.

``HOARD_FILE``: the card is a stand-in: llama.cpp computes on the cpu, and NVML shows what the
worker counts. Once that file holds the process's own number, what is given back goes on being used,
until the process ends. ``HOARD_TELLS=0``: NVML does not say whose it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_conductor.protocol.values import Memory
    from vram_conductor.worker.llama.options import EngineOptions

MS = 1_000_000
BASE_BYTES = 40 << 20


def wear_sooner(recycle_ms: int) -> None:
    from vram_conductor.worker import gauge
    from vram_conductor.worker.unexplained import Unexplained

    sooner = partial(Unexplained, recycle_ns=recycle_ms * MS, recycle_age_ns=0)
    setattr(gauge, "Unexplained", sooner)  # noqa: B010


def hoard(file: Path, *, tells: bool) -> None:
    sys.path.append(str(Path(__file__).parents[1]))
    from fake_nvml import FakeNvml, process

    from vram_conductor.worker import capacity, llama
    from vram_conductor.worker.vram import NvmlSampler

    mine = str(os.getpid())

    class Hoard(NvmlSampler):
        """Of all that the worker has counted since the file named it, the most is in use."""

        def __init__(self, device: str, _nvml: Any, env: Mapping[str, str]) -> None:
            self._card = FakeNvml()
            self._card.used = [0]
            self._held_bytes = 0
            super().__init__(device, self._card, env)

        def _hold(self, size: int) -> None:
            keeps = file.exists() and file.read_text() == mine
            self._held_bytes = max(size, self._held_bytes) if keeps else size
            self._card.used = [self._held_bytes]
            self._card.processes = [process(os.getpid(), self._held_bytes)] if tells else []

        def measure_base(self) -> int:
            self._hold(BASE_BYTES)
            return super().measure_base()

        def sample(self, own_bytes: int) -> Memory:
            self._hold(own_bytes)
            return super().sample(own_bytes)

    plain = llama.open_engine

    def on_cpu(options: EngineOptions) -> Any:
        return plain(replace(options, device_kind="cpu"))

    setattr(capacity, "NvmlSampler", Hoard)  # noqa: B010
    setattr(llama, "open_engine", on_cpu)  # noqa: B010


if "vram_conductor.worker" in sys.orig_argv:
    if "RECYCLE_MS" in os.environ:
        wear_sooner(int(os.environ["RECYCLE_MS"]))
    if "HOARD_FILE" in os.environ:
        hoard(Path(os.environ["HOARD_FILE"]), tells=os.environ.get("HOARD_TELLS") != "0")
