"""The memory of one half of an arena: allocated from its start, and pinned as a whole or not.

The thread that uses the store owns a half; :meth:`HalfMemory.pin_some` alone is called on the
sealing thread. It pins piece by piece and waits for nobody; whoever uses the half waits for one
piece at most. Before memory is given back or unmapped it is unpinned, and a view reaches over
pinned memory only, or over none (``pinning.py`` says why).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import weakref
from collections.abc import Generator
from typing import Literal

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.worker.allocation import allocate, populate, punch_hole
from vram_conductor.worker.pinning import PIECE_BYTES, Pinning

log = logging.getLogger(__name__)

Progress = Literal["done", "more", "busy"]

PIN_BYTES_MIN = 1024 * 1024
"""Less is copied before the driver has locked it."""


class HalfMemory:
    """One half. Sizes count from its start and are multiples of the page.

    Attributes:
        allocated_bytes: what of it has memory.
        pinned_bytes: what of it is pinned.
    """

    def __init__(
        self, fd: int, offset: int, memory: memoryview, word: memoryview, pinning: Pinning
    ) -> None:
        """``memory`` is the whole half, mapped from ``offset`` of ``fd``; ``word`` the place in
        the header that says what of it is allocated."""
        self._fd = fd
        self._offset = offset
        self._memory = memory
        self._pinning = pinning
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0
        self._word = word
        self.allocated_bytes: int = word[0]
        self.pinned_bytes = 0
        self._pieces: list[int] = []
        self._reserved_bytes = 0
        self._views: list[weakref.ref[memoryview]] = []
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def taken_bytes(self) -> int:
        """What is allocated, or will be soon, see :meth:`reserve`."""
        return max(self.allocated_bytes, self._reserved_bytes)

    @contextlib.contextmanager
    def _used(self) -> Generator[None]:
        """The lock, with a word to the pinning thread to let go of it after its piece."""
        self._users += 1
        try:
            with self._lock:
                yield
        finally:
            self._users -= 1

    def grow(self, size: int) -> None:
        """Allocate up to ``size``.

        Raises:
            ResourceExhausted: ``disk_full``; nothing has changed.
        """
        if size > self.allocated_bytes:
            with self._used():
                self._grow(size)

    def _grow(self, size: int) -> None:
        have = self.allocated_bytes
        if size > have:
            allocate(self._fd, self._offset + have, size - have)
            self._word[0] = self.allocated_bytes = size

    def reserve(self, size: int) -> None:
        """Let the pinning thread allocate up to ``size`` when it comes round, so that what is
        written next fits into what is pinned then."""
        self._reserved_bytes = max(self._reserved_bytes, min(size, len(self._memory)))

    def shrink(self, size: int) -> int:
        """Give back what lies beyond ``size``; returns how many bytes that were.

        A pinned page is not given back: all of it is unpinned before.
        """
        if self.taken_bytes <= size:
            return 0
        with self._used():
            self._reserved_bytes = 0
            beyond = self.allocated_bytes - size
            if beyond <= 0:
                return 0
            if self.pinned_bytes > size:
                self._unpin()
            self._word[0] = size
            if not punch_hole(self._fd, self._offset + size, beyond):
                self._word[0] = self.allocated_bytes
                return 0
            self.allocated_bytes = size
            return beyond

    def view(self, size: int, *, writable: bool) -> memoryview:
        """The first ``size`` bytes, all of them pinned or none of them until it is released."""
        with self._used():
            missing = size - self.pinned_bytes
            if self.pinned_bytes and 0 < missing <= PIECE_BYTES and self._pinning.spans:
                self._pin(min(self.allocated_bytes - self.pinned_bytes, PIECE_BYTES))
            if 0 < self.pinned_bytes < size:
                self._unpin()
            part = self._memory[:size]
            view = part if writable else part.toreadonly()
            self._views = [ref for ref in self._views if _is_out(ref)]
            self._views.append(weakref.ref(view))
            return view

    # --- pinning ------------------------------------------------------------------------------

    def pin_some(self) -> Progress:
        """Pin one more piece of what is allocated. ``busy``: not now, somebody uses the half."""
        if self._users:
            return "busy"
        with self._lock:
            if self._closed or not self._pinning.active:
                return "done"
            self._take_reserve()
            missing = self.allocated_bytes - self.pinned_bytes
            if missing <= 0 or self.allocated_bytes < PIN_BYTES_MIN:
                return "done"
            keep = self.pinned_bytes if self._pinning.spans else 0
            if any(_is_out(ref, keep) for ref in self._views):
                return "busy"
            if keep != self.pinned_bytes:
                self._unpin()
            size = min(missing, PIECE_BYTES) if self._pinning.spans else self.allocated_bytes
            return self._pin(size)

    def _pin(self, size: int) -> Progress:
        at = self.pinned_bytes
        # Pages that are there and mapped already keep the driver's locks for a shorter time.
        populate(self._address + at, size)
        if not self._pinning.pin(self._address + at, size):
            self._unpin()
            return "done"
        self._pieces.append(self._address + at)
        self.pinned_bytes = at + size
        return "more" if self.pinned_bytes < self.allocated_bytes else "done"

    def _take_reserve(self) -> None:
        # It would only have made the next copy faster.
        with contextlib.suppress(ConductorError):
            self._grow(self._reserved_bytes)
        self._reserved_bytes = 0

    def _unpin(self) -> None:
        while self._pieces:
            self._pinning.unpin(self._pieces[-1])
            self._pieces.pop()
        self.pinned_bytes = 0

    def close(self) -> bool:
        """Unpin, and pin no more: the memory is about to be unmapped. False: it must not be, the
        device still has it. Idempotent."""
        with self._used():
            self._closed = True
            try:
                self._unpin()
            except ConductorError as error:
                log.error("parked memory stays mapped: %s", error.info.message)
                return False
            self._memory.release()
            self._word.release()
            return True


def _is_out(ref: weakref.ref[memoryview], beyond_bytes: int = 0) -> bool:
    """Whether a view is still in use and reaches beyond ``beyond_bytes``."""
    view = ref()
    if view is None:
        return False
    try:
        return view.nbytes > beyond_bytes
    except ValueError:
        return False  # Released.
