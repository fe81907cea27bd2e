"""``python -m vram_conductor.worker``."""

from __future__ import annotations

import os
import sys

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.options import parse
from vram_conductor.worker.vmm import preload


def begin() -> int:
    """The worker, started again with the preload library where that can be used."""
    try:
        device = parse(sys.argv[1:], os.environ).device
    except InvalidArgument:
        pass  # main says it
    else:
        preload.enter(device.kind, device.sleep, sys.orig_argv[1:], os.environ)
    # Only now: importing it takes its time, and would be for nothing.
    from vram_conductor.worker.app import main

    return main()


if __name__ == "__main__":
    sys.exit(begin())
