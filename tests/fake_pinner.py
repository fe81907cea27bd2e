"""A pinner that locks nothing and notices every misuse of what it was asked to lock."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vram_conductor.protocol.errors import Internal, ResourceExhausted

PAGE_BYTES = 4096


@dataclass(frozen=True)
class Backing:
    """What is mapped at an address: which file, and where in it."""

    inode: int
    offset: int


def mapped(address: int) -> tuple[Backing, str] | None:
    """What is mapped at an address of this process, and its path."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        found = re.match(r"(\w+)-(\w+) \S+ (\w+) \S+ (\d+) *(.*)", line)
        assert found is not None
        start, end = int(found[1], 16), int(found[2], 16)
        if start <= address < end:
            return Backing(int(found[4]), int(found[3], 16) + address - start), found[5]
    return None


class FakePinner:
    """See ``pinning.Pinner``.

    Attributes:
        ranges: what is pinned, by address.
        faults: every rule that was broken.
        refuse: asked before each pin with (address, size); True refuses.
        pause_s: how long a pin takes.
        stuck: nothing is unpinned.
        calls, largest_bytes: how many pins there were, and the largest.
    """

    def __init__(self, *, spans: bool = True, limit_bytes: int = 1 << 40) -> None:
        self.spans = spans
        self.ranges: dict[int, int] = {}
        self.faults: list[str] = []
        self.refuse: Callable[[int, int], bool] = lambda address, size: False
        self.pause_s = 0.0
        self.stuck = False
        self.calls = self.largest_bytes = 0
        self._backing: dict[int, Backing] = {}
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()

    def pin(self, address: int, size: int) -> None:
        if self.pause_s:
            time.sleep(self.pause_s)
        with self._lock:
            self.calls += 1
            self.largest_bytes = max(self.largest_bytes, size)
            if address % PAGE_BYTES or size % PAGE_BYTES or size <= 0:
                self.faults.append(f"{address:#x}+{size} is not made of pages")
            for other, length in self.ranges.items():
                if address < other + length and other < address + size:
                    self.faults.append(f"{address:#x}+{size} overlaps {other:#x}+{length}")
            if self.refuse(address, size) or sum(self.ranges.values()) + size > self._limit_bytes:
                raise ResourceExhausted("pin_refused", f"{size} bytes are too many")
            first, last = mapped(address), mapped(address + size - PAGE_BYTES)
            if first is None or last is None or first[0].inode != last[0].inode:
                self.faults.append(f"{address:#x}+{size} is not mapped")
                return
            self._look_for_holes(first, size)
            self.ranges[address], self._backing[address] = size, first[0]

    def unpin(self, address: int) -> None:
        with self._lock:
            if self.stuck:
                raise Internal("unpin_failed", "the device is gone")
            if address not in self.ranges:
                self.faults.append(f"{address:#x} is not pinned")
                return
            self._check(address)
            del self.ranges[address], self._backing[address]

    def close(self) -> None:
        assert not self.ranges, "closed while memory is pinned"

    def check(self) -> None:
        """Nothing that is pinned has a hole or was unmapped, and no rule was broken before."""
        with self._lock:
            for address in self.ranges:
                self._check(address)
            assert not self.faults, self.faults

    def _check(self, address: int) -> None:
        now = mapped(address)
        if now is None or now[0] != self._backing[address]:
            self.faults.append(f"{address:#x} was unmapped while it was pinned")
            return
        self._look_for_holes(now, self.ranges[address])

    def _look_for_holes(self, at: tuple[Backing, str], size: int) -> None:
        try:
            fd = os.open(at[1], os.O_RDONLY)
        except FileNotFoundError:
            return  # Deleted, or replaced: nobody can look any more.
        try:
            same = os.fstat(fd).st_ino == at[0].inode
            if same and os.lseek(fd, at[0].offset, os.SEEK_HOLE) < at[0].offset + size:
                self.faults.append(f"{at[1]} has holes where it is pinned")
        finally:
            os.close(fd)

    def covers(self, view: memoryview) -> bool | None:
        """Whether a view lies in pinned memory: True all of it, False nothing of it, None where a
        copy by the device would fail: a part of it, or several ranges that cannot be spanned."""
        if not view.nbytes:
            return False
        start = int(np.frombuffer(view, np.uint8).ctypes.data)
        end = start + view.nbytes
        with self._lock:
            inside = [
                min(end, at + size) - max(start, at)
                for at, size in self.ranges.items()
                if at < end and start < at + size
            ]
        if not inside:
            return False
        if sum(inside) < view.nbytes or (len(inside) > 1 and not self.spans):
            return None
        return True
