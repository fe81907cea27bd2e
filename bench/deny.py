"""How long a client waits for the refusal of a file that alone exceeds the cap.

.venv/bin/python bench/deny.py [--rounds 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from vram_conductor.client import Conductor
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.protocol.errors import ConductorError

FILE_BYTES = 40 << 30
CAPACITY_BYTES = 8 << 30
TARGET_MS = 100


def measure(rounds: int) -> dict[str, object]:
    """Register a sparse 40 GiB file on a device of 8 GiB, again and again."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "giant.gguf"
        with path.open("wb") as file:
            file.write(b"GGUF")
            file.truncate(FILE_BYTES)
        device = StageDevice(capacity_bytes=CAPACITY_BYTES)
        took: list[float] = []
        reason = text = ""
        with Stage([device]) as stage, Conductor(stage.endpoint) as conductor:
            for index in range(rounds):
                began = time.perf_counter()
                try:
                    conductor.register(f"giant-{index}", str(path))
                except ConductorError as error:
                    took.append(1000 * (time.perf_counter() - began))
                    reason, text = error.reason, error.info.message
        return {
            "bench": "deny",
            "first_ms": round(took[0], 2),
            "median_ms": round(statistics.median(took), 2),
            "max_ms": round(max(took), 2),
            "target_ms": TARGET_MS,
            "reason": reason,
            "message": text,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.rounds)
    if args.json:
        print(json.dumps(result))
        return
    print(result["message"])
    print(
        f"refused after {result['median_ms']} ms (first {result['first_ms']} ms, "
        f"longest {result['max_ms']} ms; target < {TARGET_MS} ms)"
    )


if __name__ == "__main__":
    main()
