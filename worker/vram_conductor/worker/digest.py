"""Content digests of model files, computed once, beside everything else.

Admission knows a file by its identity (device, inode, size, time): hashing gigabytes in REGISTER
would take seconds. The digest follows in the background at the first load and is kept in a stamp.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
from pathlib import Path

from vram_conductor.protocol.split_files import combined_sha256, part_paths
from vram_conductor.protocol.stamp import Stamp, read_stamp, stamp_of, write_stamp

log = logging.getLogger(__name__)

_NICE = 19
_CHUNK_BYTES = 8 * 1024 * 1024


class Digester:
    """Knows digests, or finds them out on a thread of its own.

    Args:
        enabled: whether to hash at all (``worker.verify_digest``); stamps are read regardless.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._queue: queue.SimpleQueue[tuple[Path, str] | None] = queue.SimpleQueue()
        self._asked: set[Path] = set()
        self._found: dict[Path, Stamp] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="digester", daemon=True)
        self._thread.start()

    def known(self, path: Path) -> str | None:
        """The digest of the model at ``path`` if it is known already: its sha256, of several
        parts ``combined_sha256``. Cheap."""
        digests: list[str] = []
        for part in part_paths(path):
            digest = self._known_file(part)
            if digest is None:
                return None
            digests.append(digest)
        return combined_sha256(digests)

    def _known_file(self, path: Path) -> str | None:
        found = self._found.get(path)
        try:
            if found is not None and found == stamp_of(path.stat(), found.sha256):
                return found.sha256
        except OSError:
            return None
        return read_stamp(path)

    def request(self, path: Path, expected: str) -> None:
        """Find out the digest of ``path`` in the background; ``expected``: of the catalogue."""
        if self._enabled and path not in self._asked and self.known(path) is None:
            self._asked.add(path)
            self._queue.put((path, expected))

    def _loop(self) -> None:
        with contextlib.suppress(OSError):
            # Linux: of this thread only. Whoever streams goes first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (item := self._queue.get()) is not None:
            path, expected = item
            try:
                self._hash_model(path, expected)
            except OSError as error:
                log.warning("cannot hash %s: %s", path, error.strerror)
            finally:
                self._asked.discard(path)

    def _hash_model(self, path: Path, expected: str) -> None:
        for part in part_paths(path):
            if self._known_file(part) is None:
                self._hash(part)
        digest = self.known(path)
        if expected and digest is not None and digest != expected:
            log.error(
                "%s is not the file of the catalogue (sha256 %s…); run: conductor models verify",
                path,
                digest[:12],
            )

    def _hash(self, path: Path) -> None:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            before = os.fstat(file.fileno())
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                if self._stop.is_set():
                    return
        sha256 = digest.hexdigest()
        self._found[path] = stamp_of(before, sha256)
        try:
            write_stamp(path, sha256, before)
        except OSError as error:
            log.info("no stamp beside %s: %s", path, error.strerror)

    def close(self) -> None:
        """Stop hashing and end the thread."""
        self._stop.set()
        self._queue.put(None)
        self._thread.join()
