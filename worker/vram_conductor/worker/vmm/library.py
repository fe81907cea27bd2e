"""The preloaded library, as the engine sees it: tagged device memory that can sleep.

Inside :meth:`Vmm.region` every ``cudaMalloc`` of the calling thread belongs to the region's tag.
A tag sleeps and wakes as a whole: asleep, its addresses stay reserved and its physical memory is
the device's again; awake, it is where it was, and llama.cpp never notices.

Thread rules: every method may be called from any thread; each releases the interpreter lock.
Calls for one tag wait for each other, calls for different tags run at once. A region belongs to
the thread that entered it. Whoever puts a tag to sleep or frees its memory has seen to it that no
kernel and no copy uses it any more (``llama_synchronize`` of every context that does); that is not
waited for here: it would wait for everybody else's work, too, and spoil a CUDA graph that another
thread records.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from vram_conductor.protocol.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
)
from vram_conductor.worker.vmm import preload
from vram_conductor.worker.vmm.failure import LOST, Failure, backup_failed, text
from vram_conductor.worker.vmm.pace import GIVE_WAY_NS, PIECE_BYTES, PIECE_VARIABLE, piece_bytes

ABI = 4
"""Of ``vmm.c``; another one is refused."""

# The codes of vmm.c; _BACKUP is added by vmm_sleep to what the backup before it failed with.
_NO_MEMORY, _BACKUP = 1, 16
_tags = itertools.count(1)
_ON_HOST = 2**64 - 1
"""``ON_HOST`` of host.h"""


@dataclass(frozen=True)
class TagStat:
    """What a tag holds now.

    Attributes:
        bytes: address space, rounded up to the driver's granularity: what it takes when awake.
        mapped_bytes: of these, backed by device memory now: all awake, 0 asleep.
        backup_bytes: pinned host memory.
        allocations: number of ``cudaMalloc`` that were not freed yet.
        wake_map_ns: the last wake: creating and mapping memory, in nanoseconds.
        wake_copy_ns: the last wake: all the rest, which is waiting for the copies.
    """

    bytes: int
    mapped_bytes: int
    backup_bytes: int
    allocations: int
    wake_map_ns: int = 0
    wake_copy_ns: int = 0


class _Stat(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint64),
        ("mapped_bytes", ctypes.c_uint64),
        ("backup_bytes", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("wake_map_ns", ctypes.c_uint64),
        ("wake_copy_ns", ctypes.c_uint64),
    ]


class Vmm:
    """The library in this process. Make it with :meth:`open`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        failure = ctypes.POINTER(Failure)
        tag = ctypes.c_uint64
        for name, arguments in {
            "vmm_open": [failure],
            "vmm_back_up": [tag, failure],
            "vmm_drop_backup": [tag, failure],
            "vmm_sleep": [tag, ctypes.c_int, failure],
            "vmm_wake": [tag, failure],
            "vmm_stat": [tag, ctypes.POINTER(_Stat)],
            "vmm_free_bytes": [ctypes.POINTER(ctypes.c_uint64), failure],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        library.vmm_begin.argtypes, library.vmm_begin.restype = [tag], tag
        library.vmm_end.argtypes, library.vmm_end.restype = [tag], None
        library.vmm_pace.argtypes, library.vmm_pace.restype = [ctypes.c_uint64] * 2, None
        library.vmm_gather_begin.argtypes, library.vmm_gather_begin.restype = [], None
        library.vmm_gather_end.argtypes, library.vmm_gather_end.restype = [], ctypes.c_int
        self._library = library

    @classmethod
    def open(cls, env: Mapping[str, str] = os.environ) -> Vmm:
        """The library that this process was started with. Initialises the CUDA driver: call it
        when ``CUDA_VISIBLE_DEVICES`` is as it is to be.

        Args:
            env: :data:`PIECE_VARIABLE` is looked for here.

        Raises:
            InvalidArgument: ``bad_config``, see :func:`piece_bytes`.
            FailedPrecondition: ``vmm_unavailable``: it was not preloaded, is of another version,
                or the driver cannot do it; the message says why and what to do.
        """
        library = ctypes.CDLL(None)
        if (why := preload.reason()) or not preload.loaded():
            raise FailedPrecondition(
                "vmm_unavailable",
                why
                or "this process was started without the preload library: start a worker with "
                "`conductor up` or `conductor worker`",
            )
        library.vmm_abi.restype = ctypes.c_int
        abi = int(library.vmm_abi())
        if abi != ABI:
            raise FailedPrecondition(
                "vmm_unavailable",
                f"the preload library has interface {abi}, {ABI} is wanted; compile it again: "
                "python -m vram_conductor.worker.vmm.build",
                abi=abi,
            )
        piece = piece_bytes(env)
        vmm = cls(library)
        failure = Failure()
        if library.vmm_open(failure):
            raise FailedPrecondition("vmm_unavailable", text(failure))
        if PIECE_VARIABLE in env:
            vmm.pace(piece)
        return vmm

    def pace(self, piece_bytes: int = PIECE_BYTES, give_way_ns: int = GIVE_WAY_NS) -> None:
        """How wakes share the way to the device with others who copy, from now on.

        Args:
            piece_bytes: what is copied at a time, with two pieces under way; 0: everything at
                once, and no way is given.
            give_way_ns: so long, all in all, a wake puts pieces off while a state is copied in
                (:meth:`gathered`).
        """
        self._library.vmm_pace(piece_bytes, give_way_ns)

    def new_tag(self) -> int:
        """A tag that nobody has; it needs no giving back."""
        return next(_tags)

    @contextmanager
    def region(self, tag: int) -> Generator[None]:
        """``cudaMalloc`` of this thread belongs to ``tag`` inside; regions nest."""
        before = self._library.vmm_begin(tag)
        try:
            yield
        finally:
            self._library.vmm_end(before)

    @contextmanager
    def on_host(self) -> Generator[None]:
        """``cudaMalloc`` of this thread gives pinned host memory inside, and takes nothing from
        the device: for contexts that are made only to see how large they would be."""
        with self.region(_ON_HOST):
            yield

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Copies of this thread between host and device are put together inside, and are done
        when it is left, not before: nothing inside may read what it copies. Nests.

        Raises:
            Internal: ``driver_error``: at the end: not everything was copied.
        """
        self._library.vmm_gather_begin()
        try:
            yield
        except BaseException:
            self._library.vmm_gather_end()
            raise
        if code := self._library.vmm_gather_end():
            raise Internal(
                "driver_error", f"copying state failed with CUDA error {code}", cuda=code
            )

    def stat(self, tag: int) -> TagStat:
        """What ``tag`` holds now; all 0 for one that has nothing. Waits for a move of the tag."""
        stat = _Stat()
        self._library.vmm_stat(tag, stat)
        return TagStat(
            stat.bytes,
            stat.mapped_bytes,
            stat.backup_bytes,
            stat.allocations,
            stat.wake_map_ns,
            stat.wake_copy_ns,
        )

    def back_up(self, tag: int) -> None:
        """Copy the contents of ``tag`` to pinned host memory, what is not there yet. It stays
        until :meth:`drop_backup` or the memory is freed, and is not kept up to date.

        Raises:
            Internal: ``backup_failed``: no pinned memory (``details["need_bytes"]``), or the
                driver refused; there is no more backup than before.
            FailedPrecondition: ``backup_gone``: the tag sleeps without one.
        """
        failure = Failure()
        if code := self._library.vmm_back_up(tag, failure):
            raise backup_failed(code, failure)

    def drop_backup(self, tag: int) -> None:
        """Give the pinned memory back. A tag that sleeps cannot be woken afterwards, if its
        contents were to be kept, only freed.

        Raises:
            Internal: ``backup_failed``: the driver refused; it can be tried again.
        """
        failure = Failure()
        if code := self._library.vmm_drop_backup(tag, failure):
            raise backup_failed(code, failure)

    def sleep(self, tag: int, keep: bool) -> None:
        """Give the device memory of ``tag`` back; the addresses stay. Nothing to do for a tag
        that sleeps already.

        Args:
            keep: the contents are needed again: they are backed up first, where they are not yet
                (a backup that exists is taken as it is: nothing is copied). Otherwise the memory
                is all zero after the wake.

        Raises:
            Internal: ``backup_failed``: nothing changed. ``sleep_failed``: the driver refused;
                the tag is awake again as far as possible (see :meth:`stat`), without ``keep``
                cleared, where it had been given back.
        """
        failure = Failure()
        code = self._library.vmm_sleep(tag, int(keep), failure)
        if not code:
            return
        if code >= _BACKUP:
            raise backup_failed(code - _BACKUP, failure)
        raise Internal("sleep_failed", f"device memory cannot be put to sleep: {text(failure)}")

    def wake(self, tag: int) -> None:
        """Take device memory for ``tag`` at its old addresses, and copy its backup in, if it
        slept with ``keep``. Nothing to do for a tag that is awake.

        Raises:
            ResourceExhausted: ``wake_failed``: too little free memory, ``details`` has
                ``need_bytes`` and ``free_bytes``; it sleeps on and can be tried again.
            Internal: ``wake_failed``: the driver refused; it sleeps on.
            FailedPrecondition: ``backup_gone``: its backup was dropped in its sleep.
        """
        failure = Failure()
        code = self._library.vmm_wake(tag, failure)
        if not code:
            return
        if code == LOST:
            raise backup_failed(code, failure)
        if code == _NO_MEMORY:
            need, free = int(failure.need_bytes), int(failure.free_bytes)
            raise ResourceExhausted(
                "wake_failed",
                f"waking needs {need} bytes of device memory, {free} are free; it sleeps on",
                retryable=True,
                need_bytes=need,
                free_bytes=free,
            )
        raise Internal("wake_failed", f"device memory cannot be woken: {text(failure)}")

    def free_bytes(self) -> int:
        """Free memory of the device now, as the driver tells it. Makes a CUDA context where
        there is none.

        Raises:
            Internal: ``driver_error``.
        """
        value, failure = ctypes.c_uint64(), Failure()
        if self._library.vmm_free_bytes(value, failure):
            raise Internal("driver_error", f"free device memory is unknown: {text(failure)}")
        return value.value
