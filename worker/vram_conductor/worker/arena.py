"""One mapped arena file (format: ``arena_format``): write, commit, seal, verify one state.

Whoever uses the store owns an arena; the sealing thread calls :meth:`Arena.seal` and ``pin_some``
alone. Memory is allocated before it is touched: a full file system is an error, never SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from itertools import pairwise

from vram_conductor.protocol.errors import ConductorError, Internal
from vram_conductor.worker import arena_file
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.allocation import allocate
from vram_conductor.worker.arena_format import Descriptor, Half, Held
from vram_conductor.worker.half_memory import HalfMemory, Progress
from vram_conductor.worker.pinning import Pinning
from vram_conductor.worker.store import ParkedMeta


class Arena:
    """A mapped arena. Build one with :meth:`create` or :meth:`open`."""

    def __init__(self, fd: int, half_bytes: int, pinning: Pinning | None = None) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, fmt.file_bytes(half_bytes))
        self._view = memoryview(self._map)
        self._words = self._view[: fmt.PAGE_BYTES].cast("Q")
        self.half_bytes = half_bytes
        self._held: Held | None = None
        self._pinning = pinning or Pinning()
        self._halves = (self._half_memory(0), self._half_memory(1))
        self._hold_lock = threading.Lock()
        self._holds = 0
        self._doomed = False

    def _half_memory(self, half: Half) -> HalfMemory:
        offset = fmt.data_offset(half, self.half_bytes)
        memory = self._view[offset : offset + self.half_bytes]
        index = fmt.WORD_ALLOCATED[half]
        return HalfMemory(self._fd, offset, memory, self._words[index : index + 1], self._pinning)

    @classmethod
    def create(
        cls, dir_fd: int, name: str, half_bytes: int, pinning: Pinning | None = None
    ) -> Arena:
        """Make an empty arena; only its header is allocated.

        Raises:
            ResourceExhausted: ``disk_full``; no file is left.
            Internal: ``arena_io``.
        """
        fd = arena_file.create(dir_fd, name, half_bytes)
        try:
            arena = cls(fd, half_bytes, pinning)
        except BaseException as error:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
            if isinstance(error, OSError):
                raise Internal("arena_io", f"cannot map a new arena: {error}") from error
            raise
        words = arena._words
        words[fmt.WORD_MAGIC] = fmt.MAGIC
        words[fmt.WORD_VERSION] = fmt.FORMAT_VERSION
        words[fmt.WORD_HALF_BYTES] = half_bytes
        words[fmt.WORD_STATIC_SUM] = fmt.static_sum(half_bytes)
        return arena

    @classmethod
    def open(
        cls, dir_fd: int, name: str, *, sealed_only: bool, pinning: Pinning | None = None
    ) -> Arena:
        """Map an existing arena. ``sealed_only``: a state without a checksum does not count;
        where the last one has none, the one before it may still be whole.

        Raises:
            DataLoss: ``state_corrupt``: damaged, cut off, not ours, not a plain file.
            Internal: ``arena_io``: no descriptor, no address space; the file may be fine.
        """
        fd, half_bytes = arena_file.open_existing(dir_fd, name)
        try:
            arena = cls(fd, half_bytes, pinning)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise Internal("arena_io", f"cannot map a parked state: {error}") from error
            raise
        try:
            arena._fill_holes()
            arena._held = arena._find(sealed_only)
        except BaseException:
            arena.close()
            raise
        return arena

    def _fill_holes(self) -> None:
        """What the header calls allocated must be: reading a hole of a full tmpfs is SIGBUS."""
        try:
            allocate(self._fd, 0, fmt.HEADER_BYTES)
            for half in (0, 1):
                size = self._words[fmt.WORD_ALLOCATED[half]]
                if size:
                    allocate(self._fd, fmt.data_offset(half, self.half_bytes), size)
        except ConductorError as error:
            raise fmt.corrupt(f"it has holes: {error.info.message}") from None

    def _find(self, sealed_only: bool) -> Held | None:
        pages = [fmt.PAGE_BYTES, 2 * fmt.PAGE_BYTES, fmt.HEADER_BYTES]
        descriptors = [bytes(self._view[start:end]) for start, end in pairwise(pages)]
        found = fmt.find(tuple(self._words), descriptors, sealed_only)
        if found is not None:
            # The commit word must never name a half that the next write is going to use.
            self._words[fmt.WORD_COMMIT] = found.descriptor.seq << 1 | found.half
        return found

    @property
    def meta(self) -> ParkedMeta | None:
        """Identity of the committed state, None if there is none."""
        return self._held.descriptor.meta if self._held else None

    @property
    def seq(self) -> int:
        """Number of the committed state, 0 if there is none."""
        return self._held.descriptor.seq if self._held else 0

    @property
    def allocated_bytes(self) -> int:
        """What the file takes, or will soon take, see :meth:`reserve`."""
        return fmt.HEADER_BYTES + sum(half.taken_bytes for half in self._halves)

    @property
    def spare_bytes(self) -> int:
        """What of it the committed state does not need."""
        return self.allocated_bytes - fmt.HEADER_BYTES - self._kept_bytes()

    def _kept_bytes(self) -> int:
        """What the committed state needs of its half's memory."""
        if self._held is None:
            return 0
        need = fmt.round_up(self._held.descriptor.meta.payload_bytes, fmt.GROW_BYTES)
        return min(need, self._halves[self._held.half].allocated_bytes)

    def _spare(self) -> Half:
        return 0 if self._held is None or self._held.half == 1 else 1

    def fits(self, need_bytes: int) -> bool:
        """Whether a half can hold ``need_bytes``."""
        return need_bytes <= self.half_bytes

    def growth_bytes(self, need_bytes: int) -> int:
        """How many more bytes :meth:`begin` would allocate."""
        wanted = min(self.half_bytes, fmt.round_up(need_bytes, fmt.GROW_BYTES))
        return max(0, wanted - self._halves[self._spare()].taken_bytes)

    def begin(self, need_bytes: int) -> memoryview:
        """A writable view of the spare half, exactly ``need_bytes`` long.

        Raises:
            ResourceExhausted: ``disk_full``; the committed state is untouched.
        """
        assert self.fits(need_bytes)
        spare = self._spare()
        # Whatever this half held is void from here on; the commit word names the other half.
        self._words[fmt.WORD_SEAL_SEQ[spare]] = 0
        page = fmt.PAGE_BYTES * (1 + spare)
        self._view[page : page + 16] = bytes(16)
        half = self._halves[spare]
        half.grow(min(self.half_bytes, fmt.round_up(need_bytes, fmt.GROW_BYTES)))
        return half.view(need_bytes, writable=True)

    def commit(self, meta: ParkedMeta) -> None:
        """Make what was written since :meth:`begin` the committed state."""
        spare = self._spare()
        seq = self.seq + 1
        descriptor = Descriptor(seq=seq, meta=meta)
        packed = fmt.pack_descriptor(descriptor)
        page = fmt.PAGE_BYTES * (1 + spare)
        self._view[page : page + len(packed)] = packed
        self._words[fmt.WORD_COMMIT] = seq << 1 | spare
        self._held = Held(spare, descriptor, None)
        with contextlib.suppress(OSError):
            os.utime(self._fd)  # Stores through a mapping do not touch tmpfs times.

    def payload(self) -> memoryview:
        """A read-only view of the committed state.

        Raises:
            DataLoss: ``state_corrupt``: the file has been cut off behind our back.
        """
        assert self._held is not None
        if os.fstat(self._fd).st_size != fmt.file_bytes(self.half_bytes):
            raise fmt.corrupt("cut off")
        size = self._held.descriptor.meta.payload_bytes
        return self._halves[self._held.half].view(size, writable=False)

    def seal(self) -> bool:
        """Write the committed state's checksum; False if a newer state came meanwhile.

        Safe beside the engine thread: a seal that comes too late carries an old number.
        """
        state = self._held
        if state is None:
            return False
        offset = fmt.data_offset(state.half, self.half_bytes)
        size = state.descriptor.meta.payload_bytes
        checksum = fmt.payload_sum(self._view[offset : offset + size])
        self._words[fmt.WORD_SEAL_SUM[state.half]] = checksum
        self._words[fmt.WORD_SEAL_SEQ[state.half]] = state.descriptor.seq
        return self._held is state

    def verify(self) -> None:
        """Compare the committed state with its seal.

        Raises:
            DataLoss: ``state_corrupt``.
        """
        assert self._held is not None
        with self.payload() as payload:
            if fmt.payload_sum(payload) != self._held.seal:
                raise fmt.corrupt("its checksum does not match", payload_bytes=len(payload))

    def free_spare(self, *, writing: bool = False) -> int:
        """Give back what neither state nor writer needs; returns how many bytes that were."""
        before = self.allocated_bytes
        if self._held is not None:
            self._halves[self._held.half].shrink(self._kept_bytes())
        # A sealing thread may still read the spare half, and reading a hole allocates.
        if not self._holds and not writing:
            spare = self._spare()
            self._words[fmt.WORD_SEAL_SEQ[spare]] = 0
            self._halves[spare].shrink(0)
        return before - self.allocated_bytes

    # --- pinned memory ------------------------------------------------------------------------

    def reserve(self, least: int, size: int) -> None:
        """Let halves in use with less than ``least`` bytes get ``size`` when they are pinned."""
        for half in self._halves:
            if 0 < half.allocated_bytes < least:
                half.reserve(size)

    def pin_some(self) -> Progress:
        """Pin one more piece of what is allocated, see :meth:`HalfMemory.pin_some`."""
        committed, spare = self._halves[1 - self._spare()], self._halves[self._spare()]
        # The spare one has its turn when it is committed; what is pinned of it stays complete.
        if self._doomed:
            return "done"
        step = committed.pin_some()
        return spare.pin_some() if step == "done" and spare.pinned_bytes else step

    @property
    def pinned(self) -> bool:
        """Whether the committed state lies in pinned memory."""
        meta, half = self.meta, self._halves[1 - self._spare()]
        return meta is not None and 0 < meta.payload_bytes <= half.pinned_bytes

    # --- the mapping --------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether a :meth:`hold` keeps its memory."""
        return self._holds > 0

    def hold(self) -> None:
        """Keep the mapping until :meth:`release`, whatever happens to the arena."""
        with self._hold_lock:
            self._holds += 1

    def release(self) -> None:
        """Undo one :meth:`hold`; the last one carries out a :meth:`close` that came meanwhile."""
        with self._hold_lock:
            self._holds -= 1
            if self._holds == 0 and self._doomed:
                self._unmap()

    def close(self) -> None:
        """Unmap, at once or when the last hold goes. Idempotent."""
        with self._hold_lock:
            self._doomed = True
            if self._holds == 0:
                self._unmap()

    def _unmap(self) -> None:
        if self._fd < 0:
            return
        unpinned = self._halves[0].close() & self._halves[1].close()
        os.close(self._fd)
        self._fd = -1
        if not unpinned:
            return
        self._words.release()
        self._view.release()
        # A view that is still out keeps the memory until it is released.
        with contextlib.suppress(BufferError):
            self._map.close()
