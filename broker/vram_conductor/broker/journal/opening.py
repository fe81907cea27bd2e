"""Opening the journal: check, repair what a crash leaves, refuse what is damaged."""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.broker.journal import format as journal_format
from vram_conductor.broker.journal import replay
from vram_conductor.broker.journal.files import (
    NEW_SUFFIX,
    sync_folder,
    write_all,
    write_snapshot,
)
from vram_conductor.broker.journal.replay import Replay
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.shell.logs import Log
from vram_conductor.protocol.errors import DataLoss, FailedPrecondition, Unavailable

JOURNAL_NAME = "journal.vmcj"


@dataclass(frozen=True, slots=True)
class Opened:
    """A journal that is ready for ``Journal``.

    Attributes:
        fd: opened for appending.
        size: its length in bytes.
        live_bytes: length that a rewrite would leave, roughly.
        unreadable: intact records of an unknown kind.
        restored: the state that it holds.
    """

    path: Path
    fd: int
    size: int
    live_bytes: int
    unreadable: int
    restored: Restored


def open_journal(folder: Path, log: Log, *, skip_corrupt: bool = False) -> Opened:
    """Open or create the journal in ``folder``; the caller holds the folder's lock.

    A cut-off last record is removed with a warning: its write never finished, so nobody was told
    of it. With ``skip_corrupt`` damaged records are left out and the file as it was is kept
    beside it.

    Raises:
        DataLoss: ``journal_corrupt``: damage in front of intact records, or no journal at all;
            the message names path, offset and the way out.
        FailedPrecondition: ``journal_newer``: written by a later version.
        Unavailable: ``journal_unusable``: the operating system refuses.
    """
    path = folder / JOURNAL_NAME
    try:
        path.with_suffix(NEW_SUFFIX).unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        return _check(path, fd, log, skip_corrupt)
    except OSError as error:
        os.close(fd)
        raise _unusable(path, error) from None
    except BaseException:
        os.close(fd)
        raise


def _check(path: Path, fd: int, log: Log, skip_corrupt: bool) -> Opened:
    size = os.fstat(fd).st_size
    result = _read(path, fd, size, skip_corrupt) if size else None
    if result is None:
        os.ftruncate(fd, 0)
        write_all(fd, journal_format.header())
        os.fsync(fd)
        sync_folder(path.parent)
        return _opened(path, fd, Replay())
    for key in sorted(result.lost):
        log("warning", "journal.conversation_emptied", conversation=str(key))
    if result.unreadable:
        log("warning", "journal.unknown_records", count=result.unreadable, path=str(path))
    if result.holes:
        return _opened(path, _without_holes(path, fd, result, log), result)
    if result.good_bytes < size:
        cut = size - result.good_bytes
        log("warning", "journal.torn_tail", path=str(path), offset=result.good_bytes, bytes=cut)
        os.ftruncate(fd, result.good_bytes)
        os.fsync(fd)
    return _opened(path, fd, result)


def _without_holes(path: Path, fd: int, result: Replay, log: Log) -> int:
    """Replace the file by what is intact in it; the damaged one is kept as a copy."""
    copy = _keep_copy(path)
    new, size = write_snapshot(path.with_suffix(NEW_SUFFIX), result.restored)
    path.with_suffix(NEW_SUFFIX).replace(path)
    sync_folder(path.parent)
    os.close(fd)
    log("warning", "journal.skipped", holes=len(result.holes), copy=str(copy), bytes=size)
    return new


def _read(path: Path, fd: int, size: int, skip_corrupt: bool) -> Replay | None:
    """The folded file; None if it holds nothing yet (a header that was cut off)."""
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as data:
        head = journal_format.read_header(data)
        if head.state == "torn":
            return None
        if head.state == "newer":
            raise FailedPrecondition(
                "journal_newer",
                f"{path} has format {head.version}, this version reads up to "
                f"{journal_format.FORMAT_VERSION}; start the newer version, or another --state-dir",
                version=head.version,
            )
        if head.state == "bad" and not skip_corrupt:
            raise _corrupt(path, 0, 0, 0)
        result = replay.replay(data)
        if head.state == "bad":
            result.holes.insert(0, (0, journal_format.HEADER_BYTES))
    if result.holes and not skip_corrupt:
        first, end = result.holes[0]
        raise _corrupt(path, first, end - first, len(result.holes))
    return result


def _corrupt(path: Path, offset: int, length: int, holes: int) -> DataLoss:
    what = f"{length} damaged bytes at offset {offset}" if length else "it is no journal (header)"
    return DataLoss(
        "journal_corrupt",
        f"{path}: {what}. Restore the file from a backup, or start once with "
        "--journal-skip-corrupt: intact records are used, conversations with a gap start empty, "
        "and the file as it is now is kept beside it",
        offset=offset,
        damaged_bytes=length,
        holes=holes,
    )


def _unusable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        "journal_unusable",
        f"cannot use the journal {path}: {error.strerror}; give a writable --state-dir with space",
        errno=error.errno,
    )


def _keep_copy(path: Path) -> Path:
    number = 1
    while (copy := path.with_suffix(f".corrupt-{number}")).exists():
        number += 1
    shutil.copy2(path, copy)
    return copy


def _opened(path: Path, fd: int, result: Replay) -> Opened:
    return Opened(
        path=path,
        fd=fd,
        size=os.fstat(fd).st_size,
        live_bytes=replay.compact_bytes(result.restored),
        unreadable=result.unreadable,
        restored=result.restored,
    )
