"""What the device has in use while contexts are planned, in a process with the preload library.

``python -m dry_scenes MODEL``: one line of JSON, in bytes beyond what was in use before.
"""

from __future__ import annotations

import json
import sys
import threading

from vram_conductor.protocol.values import PoolShape
from vram_conductor.worker.llama import open_engine
from vram_conductor.worker.llama.dryrun import DryRunner
from vram_conductor.worker.llama.engine import LlamaEngine
from vram_conductor.worker.llama.options import EngineOptions
from vram_conductor.worker.llama.scratch import Gpu

GPU = Gpu(132, 90, 128 << 20)


def peak(engine: LlamaEngine, runner: DryRunner, path: str) -> int:
    """The most that is in use during an estimate."""
    before = engine.used_bytes() or 0
    most, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            most[0] = max(most[0], engine.used_bytes() or 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        runner.estimate(path, "m", PoolShape(4096, 2), 2048, None)
    finally:
        stop.set()
        thread.join()
        runner.close()
    return most[0] - before


def main() -> None:
    engine = open_engine(EngineOptions(device_kind="cuda"))
    path, options = sys.argv[1], engine.options
    # Whatever the first dry run brings for good is there after this one.
    DryRunner(options, GPU, engine._vmm).estimate(path, "m", PoolShape(256, 1), 256, None)
    found = {
        "on_host": peak(engine, DryRunner(options, GPU, engine._vmm), path),
        "on_device": peak(engine, DryRunner(options, GPU), path),
        "recurrent": DryRunner(options, GPU, engine._vmm)
        .estimate(path, "m", PoolShape(4096, 2), 2048, None)
        .recurrent_bytes,
    }
    engine.close()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
