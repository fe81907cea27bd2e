"""A device's memory over time, watched by a process that takes none of it."""

from __future__ import annotations

import dataclasses
import queue
import subprocess
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import msgspec

from vram_conductor.client.bench_setting import worker_command
from vram_conductor.protocol.errors import ConductorError, Internal
from vram_conductor.protocol.status import DeviceStatus

FIRST_S = 30.0
END_S = 5.0
CALM_S = 0.3
PEAKS_MAX = 24
MIB = 1 << 20

_Seen = tuple[float, int, dict[str, tuple[str, float]]]
"""Time, bytes in use, and who did what since when."""


class _Line(msgspec.Struct, frozen=True):
    ms: int
    bytes: int


@dataclass(frozen=True)
class Mark:
    """Something that happened at a time, for the picture."""

    s: float
    what: str


@dataclass(frozen=True)
class Peak:
    """More in use than ever before.

    Attributes:
        s, bytes: the sample.
        doing: what was being done at that moment, and for how long already: (what, seconds).
        moved: kind of move → how many the worker has reported since the last peak (all, at the
            first one); the one that made the peak is among them, unless it is still under way.
        lines: what the worker said it had on the device, after the peak: key → bytes.
    """

    s: float
    bytes: int
    doing: list[tuple[str, float]]
    moved: dict[str, int]
    lines: dict[str, int]

    def why(self) -> str:
        """For a table."""
        doing = ", ".join(f"{what} ({seconds:.2f} s)" for what, seconds in self.doing)
        moved = ", ".join(f"{count} {kind}" for kind, count in sorted(self.moved.items()))
        lines = ", ".join(f"{key} {size / MIB:.1f}" for key, size in self.lines.items())
        return f"during {doing or 'nothing'}; moved: {moved or '-'}; lines: {lines or '-'}"


class Looks(Protocol):
    """Asks for STATUS; ``bench_bed.Bed.status`` is it."""

    def __call__(self) -> DeviceStatus: ...


class MemoryWatch:
    """Samples until the block is left.

    Args:
        device: on cuda all use of the device counts (NVML); on cpu the anonymous memory of
            process ``pid``.
        period_ms: between two samples.
        look: asked at every peak, on a thread of its own.

    Attributes:
        at_s, used_bytes: the samples, times on ``time.perf_counter``'s clock.
        marks: what happened when.
        lines: what the worker said it had on the device, and others: (time, bytes).
        peaks: every sample that was larger than all before it, as far as there was time to ask
            what was going on; the last of them is the largest.
    """

    def __init__(
        self, device: str, pid: int, period_ms: int = 20, look: Looks | None = None
    ) -> None:
        self.at_s: list[float] = []
        self.used_bytes: list[int] = []
        self.marks: list[Mark] = []
        self.lines: list[tuple[float, int]] = []
        self.peaks: list[Peak] = []
        self._first = threading.Event()
        self._look, self._most = look, -1
        self._doing: dict[str, tuple[str, float]] = {}
        self._counts: dict[str, int] = {}
        self._new: queue.SimpleQueue[_Seen | None] = queue.SimpleQueue()
        arguments = ["--device", device, "--pid", str(pid), "--period-ms", str(period_ms)]
        self._process = subprocess.Popen(
            worker_command("memory", *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self._thread.start()
        self._asking = threading.Thread(target=self._explain, name="watch-peaks", daemon=True)
        self._asking.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = msgspec.json.decode(line, type=_Line)
            except msgspec.MsgspecError:
                break
            self.at_s.append(time.perf_counter())
            self.used_bytes.append(found.bytes)
            if found.bytes > self._most:
                self._most = found.bytes
                self._new.put((self.at_s[-1], found.bytes, dict(self._doing)))
            self._first.set()
        self._first.set()
        self._new.put(None)

    def _explain(self) -> None:
        """Of peaks that follow one another faster than the broker answers, only the last."""
        while (seen := self._new.get()) is not None:
            last, ended = seen, False
            while not ended and not self._new.empty():
                more = self._new.get()
                last, ended = (last, True) if more is None else (more, False)
            self.peaks.append(self._peak(last))
            if ended:
                return

    def _peak(self, seen: _Seen) -> Peak:
        at_s, n_bytes, acts = seen
        doing = [
            (f"{who}: {what}" if who else what, round(at_s - since, 3))
            for who, (what, since) in sorted(acts.items())
        ]
        try:
            status = self._look() if self._look is not None else None
        except ConductorError:
            status = None
        if status is None:
            return Peak(at_s, n_bytes, doing, {}, {})
        counts = {kind: rate.count for kind, rate in status.rates.items()}
        moved = {kind: n - self._counts.get(kind, 0) for kind, n in counts.items()}
        self._counts = counts
        lines = {line.key: line.bytes for line in status.resident}
        return Peak(at_s, n_bytes, doing, {k: n for k, n in moved.items() if n}, lines)

    def doing(self, who: str, what: str) -> None:
        """``who`` does this from now on; one of several that do something at the same time."""
        self._doing[who] = what, time.perf_counter()

    def why(self) -> str:
        """What went on when most was in use."""
        return self.peaks[-1].why() if self.peaks else "unknown"

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
            return {"s": [], "bytes": [], "marks": [], "lines": [], "peaks": []}
        zero, each = self.at_s[0], -(-len(self.at_s) // points_max)
        starts = range(0, len(self.at_s), each)
        return {
            "s": [round(self.at_s[at] - zero, 3) for at in starts],
            "bytes": [max(self.used_bytes[at : at + each]) for at in starts],
            "lines": [[round(when - zero, 3), size] for when, size in self.lines],
            "marks": [{"s": round(mark.s - zero, 3), "what": mark.what} for mark in self.marks],
            "peaks": [
                {**dataclasses.asdict(peak), "s": round(peak.s - zero, 3)}
                for peak in self.peaks[-PEAKS_MAX:]
            ],
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
        self._asking.join(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
