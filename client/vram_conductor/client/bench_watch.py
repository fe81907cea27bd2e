"""A device's memory over time, watched by a process that takes none of it."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from vram_conductor.client.bench_setting import worker_command
from vram_conductor.protocol.errors import Internal

FIRST_S = 30.0
END_S = 5.0
CALM_S = 0.3


class _Line(msgspec.Struct, frozen=True):
    ms: int
    bytes: int


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time, for the picture."""

    s: float
    what: str


class MemoryWatch:
    """Samples until the block is left.

    Args:
        device: on cuda all use of the device counts (NVML); on cpu the anonymous memory of
            process ``pid``.
        period_ms: between two samples.

    Attributes:
        at_s, used_bytes: the samples, times on ``time.perf_counter``'s clock.
        marks: what happened when.
        lines: what the worker said it had on the device, and others: (time, bytes).
    """

    def __init__(self, device: str, pid: int, period_ms: int = 20) -> None:
        self.at_s: list[float] = []
        self.used_bytes: list[int] = []
        self.marks: list[Mark] = []
        self.lines: list[tuple[float, int]] = []
        self._first = threading.Event()
        arguments = ["--device", device, "--pid", str(pid), "--period-ms", str(period_ms)]
        self._process = subprocess.Popen(
            worker_command("memory", *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError:
                break
            self.at_s.append(time.perf_counter())
            self.used_bytes.append(found.bytes)
            self._first.set()
        self._first.set()

    def mark(self, what: str) -> None:
        """Something happens now."""
        self.marks.append(Mark(time.perf_counter(), what))

    def note_lines(self, n_bytes: int) -> None:
        """The worker's own sum, as STATUS has it now."""
        self.lines.append((time.perf_counter(), n_bytes))

    def now(self) -> int:
        """Bytes in use once what was under way is over: a while without a change.

        Raises:
            Internal: ``bench_failed``: the watcher says nothing.
        """
        until = time.perf_counter() + END_S
        begin = time.perf_counter()
        while time.perf_counter() < until:
            threading.Event().wait(CALM_S / 3)
            recent = self.since(max(begin, time.perf_counter() - CALM_S))
            if time.perf_counter() - begin > CALM_S and recent and len(set(recent)) == 1:
                break
        if not self.used_bytes:
            raise Internal("bench_failed", "the memory watcher says nothing")
        return self.used_bytes[-1]

    def since(self, from_s: float) -> list[int]:
        """Samples from a time on."""
        pairs = zip(self.at_s, self.used_bytes, strict=False)
        return [used for when, used in pairs if when >= from_s]

    def plain(self, points_max: int = 4000) -> dict[str, object]:
        """For the JSON: peaks of equal stretches, so that none is lost; seconds since the first
        sample."""
        if not self.at_s:
            return {"s": [], "bytes": [], "marks": [], "lines": []}
        zero, each = self.at_s[0], -(-len(self.at_s) // points_max)
        starts = range(0, len(self.at_s), each)
        return {
            "s": [round(self.at_s[at] - zero, 3) for at in starts],
            "bytes": [max(self.used_bytes[at : at + each]) for at in starts],
            "lines": [[round(when - zero, 3), size] for when, size in self.lines],
            "marks": [{"s": round(mark.s - zero, 3), "what": mark.what} for mark in self.marks],
        }

    def __enter__(self) -> Self:
        self._first.wait(FIRST_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
