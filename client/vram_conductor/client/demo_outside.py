"""What the demo sees of the system from outside: /proc and the arena files."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from pathlib import Path

PERIOD_S = 0.01
_HALF_BYTES_OFFSET = 16
_HEADER_BYTES = 12288
_FLIPPED_OFFSET = 4096
"""Of the byte in a half's payload: behind its own little header."""


def resident_bytes(pid: int) -> int:
    """Anonymous memory of a process (its own buffers, not mapped files, not shared memory)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith("RssAnon:")]
    return int(found[0].split()[1]) * 1024 if found else 0


class PeakMemory:
    """Samples a process every 10 ms until it is stopped; ``peak_bytes`` is the largest sample."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.first_bytes: int = resident_bytes(pid)
        self.peak_bytes: int = self.first_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self.pid))

    def stop(self) -> int:
        """Stop sampling; the peak in bytes."""
        self._stop.set()
        self._thread.join()
        return self.peak_bytes


def kill(pid: int) -> bool:
    """``kill -9``; True once the process is gone."""
    assert pid > 1, "0 and -1 mean everybody"
    os.kill(pid, signal.SIGKILL)
    return wait_dead(pid, 10)


def wait_dead(pid: int, seconds: float) -> bool:
    """Wait until a process is gone (a zombie counts as gone)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(PERIOD_S)
    return False


def flip_bytes(arena_dir: Path, agent: str) -> int:
    """Flip one payload byte in both halves of the arenas that belong to ``agent``.

    Only while no worker has them: what is flipped before its checksum was made is not noticed.

    Returns:
        How many bytes were flipped (layout: the worker's ``arena_format``).
    """
    flipped = 0
    for path in sorted(arena_dir.rglob("*")):
        if not path.is_file() or path.stat().st_size <= _HEADER_BYTES:
            continue
        with path.open("r+b") as file:
            head = file.read(_HEADER_BYTES)
            if head[:8] != b"VMCARENA" or agent.encode() not in head:
                continue
            (half_bytes,) = struct.unpack_from("=Q", head, _HALF_BYTES_OFFSET)
            for half in range(2):
                offset = _HEADER_BYTES + half * half_bytes + _FLIPPED_OFFSET
                file.seek(offset)
                byte = file.read(1)
                if byte:
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ 0x40]))
                    flipped += 1
    return flipped
