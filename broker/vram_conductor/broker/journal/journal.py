"""The append-only journal: what the broker must still know after it was killed.

``append`` returns when the record is in the file (safe against a crash of this process). Agent
and epoch records are also forced to the disk before it returns; transcripts follow by group
commit, on a thread, so that a slow disk never stops the streams. When the file has doubled it
is rewritten on that thread and swapped in. A full disk makes the journal ``degraded``: records
wait in memory, in order, until there is room.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vram_conductor.broker.journal import format as journal_format
from vram_conductor.broker.journal import replay
from vram_conductor.broker.journal.backlog import Backlog
from vram_conductor.broker.journal.files import (
    NEW_SUFFIX,
    sync_folder,
    write_all,
    write_snapshot,
)
from vram_conductor.broker.journal.opening import Opened
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    AgentRemoved,
    BrokerEpoch,
    Record,
    WorkerEpochSeen,
)
from vram_conductor.broker.shell.logs import Log

GROUP_COMMIT_NS = 50_000_000
RETRY_NS = 1_000_000_000
POLL_NS = 5_000_000
"""How soon to look again for the end of a sync or a rewrite."""

REWRITE_SLACK_BYTES = 16 * 1024 * 1024
"""Below this much growth a rewrite is not worth its writes."""

FORCED = (AgentRegistered, AgentRemoved, BrokerEpoch, WorkerEpochSeen)


class Journal:
    """An open journal; owned by one thread.

    Args:
        opened: from ``journal_open.open_journal``.
        log: where news about the disk go.
        clock_ns: monotonic time.
        rewrite_slack_bytes: see REWRITE_SLACK_BYTES.
    """

    def __init__(
        self,
        opened: Opened,
        log: Log,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        rewrite_slack_bytes: int = REWRITE_SLACK_BYTES,
    ) -> None:
        self._path: Path = opened.path
        self._fd = opened.fd
        self._size = opened.size
        self._log = log
        self._clock_ns = clock_ns
        self._slack_bytes = rewrite_slack_bytes
        self._rewrite_at_bytes = 2 * opened.live_bytes + rewrite_slack_bytes
        # A rewrite would drop records of a kind that only a newer version understands.
        self._rewritable = not opened.unreadable
        self._backlog = Backlog()
        self._trouble = ""
        self._retry_at_ns = 0
        self._dirty_since_ns: int | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._syncing: Future[None] | None = None
        self._rewriting: Future[tuple[int, int]] | None = None
        self._rewrite_upto = 0
        self._look_at_ns = 0

    @property
    def trouble(self) -> str:
        """Why the disk takes no records; empty while it does."""
        return self._trouble

    @property
    def waiting(self) -> int:
        """Records that are in memory only."""
        return len(self._backlog)

    @property
    def size_bytes(self) -> int:
        """Length of the file's intact part."""
        return self._size

    def append(self, record: Record) -> None:
        """Append one record. Never raises for a disk that is full or broken."""
        if self._trouble:
            self._backlog.add(record)
            return
        try:
            self._write(record)
        except OSError as error:
            self._backlog.add(record)
            self._fail(error)
            return
        if isinstance(record, FORCED):
            self._force()
        elif self._dirty_since_ns is None:
            self._dirty_since_ns = self._clock_ns()

    def tick(self) -> None:
        """Group commit, retries and rewriting; call it at ``next_deadline_ns`` at the latest."""
        now_ns = self._clock_ns()
        if self._trouble and now_ns >= self._retry_at_ns:
            self._retry()
        self._collect_sync()
        self._collect_rewrite()
        if (
            self._dirty_since_ns is not None
            and self._syncing is None
            and now_ns - self._dirty_since_ns >= GROUP_COMMIT_NS
        ):
            self._dirty_since_ns = None
            self._syncing = self._thread.submit(os.fdatasync, self._fd)
        if self._size > self._rewrite_at_bytes and self._rewriting is None and self._rewritable:
            self._start_rewrite()
        self._look_at_ns = now_ns + POLL_NS

    def next_deadline_ns(self) -> int | None:
        """When to call ``tick`` at the latest."""
        due: list[int] = []
        if self._trouble:
            due.append(self._retry_at_ns)
        if self._syncing or self._rewriting:
            due.append(self._look_at_ns)
        elif self._dirty_since_ns is not None:
            due.append(self._dirty_since_ns + GROUP_COMMIT_NS)
        return min(due, default=None)

    def close(self) -> None:
        """Write what waits, force everything to the disk. Idempotent; logs what stays lost."""
        if self._fd < 0:
            return
        self._thread.shutdown(wait=True)
        self._collect_rewrite()
        if self._trouble:
            self._retry()
        else:
            self._force()
        if self._trouble:
            self._log("error", "journal.lost", why=self._trouble, records=self.waiting)
        os.close(self._fd)
        self._fd = -1

    # --- writing ------------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        frame = journal_format.frame(replay.encode(record))
        try:
            write_all(self._fd, frame)
        except OSError:
            # Half a frame would hide what follows it: cut it off (that works on a full disk).
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(frame)

    def _force(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._sync_failed(error)

    def _sync_failed(self, error: OSError) -> None:
        """The kernel may have dropped the pages and reports it only once, so a later sync that
        succeeds proves nothing: write the whole file anew."""
        self._fail(error)
        self._rewrite_at_bytes = 0

    def _fail(self, error: OSError) -> None:
        self._retry_at_ns = self._clock_ns() + RETRY_NS
        trouble = f"{error.strerror or error} ({self._path})"
        if trouble != self._trouble:
            self._trouble = trouble
            hint = "free space on that disk; nothing is lost while this process lives"
            self._log("error", "journal.degraded", why=trouble, hint=hint)

    def _retry(self) -> None:
        try:
            # After a write that failed the file may be longer than what we count as good.
            os.ftruncate(self._fd, self._size)
            while (record := self._backlog.first()) is not None:
                self._write(record)
                self._backlog.drop(1)
            os.fdatasync(self._fd)
        except OSError as error:
            self._fail(error)
            return
        self._trouble = ""
        self._log("info", "journal.recovered", path=str(self._path))

    def _collect_sync(self) -> None:
        if self._syncing is None or not self._syncing.done():
            return
        error = self._syncing.exception()
        self._syncing = None
        if isinstance(error, OSError):
            self._sync_failed(error)
        elif error is not None:
            raise error

    # --- rewriting ----------------------------------------------------------------------------

    def _start_rewrite(self) -> None:
        self._rewrite_upto = self._size
        path = self._path.with_suffix(NEW_SUFFIX)
        self._rewriting = self._thread.submit(_rewrite, self._fd, self._size, path)

    def _collect_rewrite(self) -> None:
        if self._rewriting is None or not self._rewriting.done():
            return
        future, self._rewriting = self._rewriting, None
        error = future.exception()
        # Whatever happens, the next attempt comes when the file has grown a good deal more.
        self._rewrite_at_bytes = 2 * self._size + self._slack_bytes
        if error is None:
            fd, size = future.result()
            try:
                self._swap_in(fd, size)
            except OSError as swap_error:
                os.close(fd)
                error = swap_error
        if error is not None:
            self._path.with_suffix(NEW_SUFFIX).unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise error
            self._log("warning", "journal.rewrite_failed", why=str(error.strerror or error))

    def _swap_in(self, fd: int, size: int) -> None:
        """Copy what was appended meanwhile, then replace the file."""
        tail = os.pread(self._fd, self._size - self._rewrite_upto, self._rewrite_upto)
        if tail:
            write_all(fd, tail)
        os.fdatasync(fd)
        self._path.with_suffix(NEW_SUFFIX).replace(self._path)
        old_fd, old_size = self._fd, self._size
        self._fd, self._size = fd, size + len(tail)
        self._rewrite_at_bytes = 2 * self._size + self._slack_bytes
        # A sync of the old file may still run on the thread; it is the same file to nobody now.
        if self._syncing is not None:
            self._thread.submit(os.close, old_fd)
        else:
            os.close(old_fd)
        with contextlib.suppress(OSError):
            sync_folder(self._path.parent)
        self._log("info", "journal.rewritten", before_bytes=old_size, after_bytes=self._size)


def _rewrite(source_fd: int, upto: int, target: Path) -> tuple[int, int]:
    """A snapshot of the first ``upto`` bytes of ``source_fd``, which do not change any more."""
    with mmap.mmap(source_fd, upto, prot=mmap.PROT_READ) as data:
        restored = replay.replay(data).restored
    return write_snapshot(target, restored)
