"""Watches a device's memory from outside: one JSON line per sample, until stdin ends.

On cuda what NVML says is in use, by anybody (no CUDA context is made here, so watching takes
nothing). On cpu the anonymous memory of one process, which is what its buffers are.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from vram_conductor.worker.vram import NvmlSampler


def watch(device: str, pid: int, period_ms: int) -> None:
    """Print ``{"ms": …, "bytes": …}`` every ``period_ms`` until stdin says end of file.

    Raises:
        ConductorError: NVML does not work.
    """
    read = _reader(device, pid)
    began = time.monotonic()
    while True:
        line = {"ms": round(1000 * (time.monotonic() - began)), "bytes": read()}
        sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
        sys.stdout.flush()
        ready, _, _ = select.select([0], [], [], period_ms / 1000)
        if ready and not os.read(0, 4096):
            return


def _reader(device: str, pid: int) -> Callable[[], int]:
    if device.startswith("cuda"):
        sampler = NvmlSampler(device)
        return lambda: sampler.sample(0).used_bytes
    return lambda: anonymous_bytes(pid)


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("RssAnon:")]
    return int(found[0].split()[1]) * 1024 if found else 0
