"""One mapped arena file (format: ``arena_format``): write, commit, seal, verify one state.

The engine thread owns an arena; :meth:`Arena.seal` alone is called on the sealing thread. Memory
is allocated before it is touched, so a full file system is an error and never SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading

from vram_conductor.protocol.errors import ConductorError, Internal
from vram_conductor.worker import arena_format as fmt
from vram_conductor.worker.allocation import allocate, no_room, punch_hole
from vram_conductor.worker.arena_format import Descriptor, Half, Held
from vram_conductor.worker.store import ParkedMeta

_OPEN_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Arena:
    """A mapped arena. Build one with :meth:`create` or :meth:`open`."""

    def __init__(self, fd: int, half_bytes: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, fmt.file_bytes(half_bytes))
        self._view = memoryview(self._map)
        self._words = self._view[: fmt.PAGE_BYTES].cast("Q")
        self.half_bytes = half_bytes
        self._held: Held | None = None
        self._pin_lock = threading.Lock()
        self._pins = 0
        self._doomed = False

    @classmethod
    def create(cls, dir_fd: int, name: str, half_bytes: int) -> Arena:
        """Make an empty arena; only its header is allocated.

        Raises:
            ResourceExhausted: ``disk_full``; no file is left.
            Internal: ``arena_io``.
        """
        try:
            fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd)
        except OSError as error:
            raise no_room(error, dir_fd, fmt.HEADER_BYTES) from None
        try:
            try:
                os.ftruncate(fd, fmt.file_bytes(half_bytes))
                allocate(fd, 0, fmt.HEADER_BYTES)
                arena = cls(fd, half_bytes)
            except OSError as error:
                raise no_room(error, fd, fmt.HEADER_BYTES) from None
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=dir_fd)
            raise
        words = arena._words
        words[fmt.WORD_MAGIC] = fmt.MAGIC
        words[fmt.WORD_VERSION] = fmt.FORMAT_VERSION
        words[fmt.WORD_HALF_BYTES] = half_bytes
        words[fmt.WORD_STATIC_SUM] = fmt.static_sum(half_bytes)
        return arena

    @classmethod
    def open(cls, dir_fd: int, name: str, *, sealed_only: bool) -> Arena:
        """Map an existing arena. ``sealed_only``: a state without a checksum does not count;
        where the last one has none, the one before it may still be whole.

        Raises:
            DataLoss: ``state_corrupt``: damaged, cut off, not ours, not a plain file.
            Internal: ``arena_io``: no descriptor, no address space; the file may be fine.
        """
        try:
            fd = os.open(name, _OPEN_FLAGS, dir_fd=dir_fd)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ELOOP}:
                raise fmt.corrupt(f"cannot be opened: {error.strerror}") from None
            raise Internal("arena_io", f"cannot open a parked state: {error}") from error
        try:
            info = os.fstat(fd)
            plain = stat.S_ISREG(info.st_mode) and info.st_nlink == 1
            if not plain or info.st_uid != os.geteuid():
                raise fmt.corrupt("not a plain file of this user")
            if info.st_size < fmt.file_bytes(fmt.PAGE_BYTES):
                raise fmt.corrupt("cut off", file_bytes=info.st_size)
            page = os.pread(fd, fmt.PAGE_BYTES, 0)
            words = tuple(memoryview(page).cast("Q"))
            half_bytes = fmt.check_words(words, info.st_size)
            arena = cls(fd, half_bytes)
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
        commit = self._words[fmt.WORD_COMMIT]
        if commit == 0:
            return None
        seq, half = commit >> 1, commit & 1
        newest = self._half_held(half, seq)
        if newest is None:
            raise fmt.corrupt("damaged descriptor")
        if not sealed_only or newest.seal is not None:
            return newest
        older = self._half_held(1 - half, seq - 1)
        if older is None or older.seal is None:
            return None
        # The commit word must never name a half that the next write is going to use.
        self._words[fmt.WORD_COMMIT] = older.descriptor.seq << 1 | older.half
        return older

    def _half_held(self, half: int, seq: int) -> Held | None:
        index: Half = 1 if half else 0
        offset = fmt.PAGE_BYTES * (1 + index)
        page = bytes(self._view[offset : offset + fmt.PAGE_BYTES])
        return fmt.held(tuple(self._words), index, fmt.unpack_descriptor(page), seq)

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
        """What the file takes."""
        return fmt.HEADER_BYTES + sum(self._words[index] for index in fmt.WORD_ALLOCATED)

    @property
    def spare_bytes(self) -> int:
        """What of it is the half that holds no committed state."""
        return self._words[fmt.WORD_ALLOCATED[self._spare()]]

    def _spare(self) -> Half:
        return 0 if self._held is None or self._held.half == 1 else 1

    def fits(self, need_bytes: int) -> bool:
        """Whether a half can hold ``need_bytes``."""
        return need_bytes <= self.half_bytes

    def growth_bytes(self, need_bytes: int) -> int:
        """How many more bytes :meth:`begin` would allocate."""
        wanted = min(self.half_bytes, fmt.round_up(need_bytes, fmt.GROW_BYTES))
        return max(0, wanted - self._words[fmt.WORD_ALLOCATED[self._spare()]])

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
        offset = fmt.data_offset(spare, self.half_bytes)
        grow = self.growth_bytes(need_bytes)
        if grow:
            have = self._words[fmt.WORD_ALLOCATED[spare]]
            allocate(self._fd, offset + have, grow)
            self._words[fmt.WORD_ALLOCATED[spare]] = have + grow
        return self._view[offset : offset + need_bytes]

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
        return self._payload(self._held)

    def _payload(self, state: Held) -> memoryview:
        offset = fmt.data_offset(state.half, self.half_bytes)
        return self._view[offset : offset + state.descriptor.meta.payload_bytes].toreadonly()

    def seal(self) -> bool:
        """Write the committed state's checksum; False if a newer state came meanwhile.

        Safe beside the engine thread: a seal that comes too late carries an old number.
        """
        state = self._held
        if state is None:
            return False
        checksum = fmt.payload_sum(self._payload(state))
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

    def free_spare(self) -> int:
        """Give the spare half's memory back; returns the bytes freed. It grows again on use."""
        spare = self._spare()
        size = self._words[fmt.WORD_ALLOCATED[spare]]
        # A sealing thread may still read this half, and reading a hole allocates.
        if not size or self._pins:
            return 0
        self._words[fmt.WORD_SEAL_SEQ[spare]] = 0
        self._words[fmt.WORD_ALLOCATED[spare]] = 0
        offset = fmt.data_offset(spare, self.half_bytes)
        if not punch_hole(self._fd, offset, size):
            self._words[fmt.WORD_ALLOCATED[spare]] = size
            return 0
        return size

    @property
    def pinned(self) -> bool:
        """Whether a :meth:`pin` keeps its memory."""
        return self._pins > 0

    def pin(self) -> None:
        """Keep the mapping until :meth:`unpin`, whatever happens to the arena."""
        with self._pin_lock:
            self._pins += 1

    def unpin(self) -> None:
        """Undo one :meth:`pin`; the last one carries out a :meth:`close` that came meanwhile."""
        with self._pin_lock:
            self._pins -= 1
            if self._pins == 0 and self._doomed:
                self._unmap()

    def close(self) -> None:
        """Unmap, at once or when the last pin goes. Idempotent."""
        with self._pin_lock:
            self._doomed = True
            if self._pins == 0:
                self._unmap()

    def _unmap(self) -> None:
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._words.release()
        self._view.release()
        # A view that is still out keeps the memory until it is released.
        with contextlib.suppress(BufferError):
            self._map.close()
