"""Runs every bench, one after the other, and writes what was measured.

    make bench            # prints the table, writes docs/bench.json

Ratios compare both sides of one run; absolute times are this machine's and only for orientation.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from vram_conductor.protocol.plain import is_list

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "docs" / "bench.json"
BENCHES = ("ledger", "deny", "broker", "throughput", "switch")


def run(name: str) -> list[dict[str, Any]]:
    """One bench in a process of its own; its rows."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    value = json.loads(result.stdout)
    return value if is_list(value) else [value]


def processor() -> str:
    """Name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name in BENCHES:
        print(f"-- {name}", flush=True)
        for row in run(name):
            rows.append(row)
            for key, value in row.items():
                if key not in ("bench", "message"):
                    print(f"   {key}: {value}", flush=True)
    OUT.write_text(json.dumps({"processor": processor(), "rows": rows}, indent=1) + "\n")
    print(f"written: {OUT.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
