"""Notices an engine that hangs: busy, and nothing moves. :class:`Watchdog` is pure.

A step, or file input of a megabyte, counts as movement: loading a large model from a slow disk
takes minutes and is no hang. The IO thread asks; if it cannot run any more itself (something
holds the interpreter's lock), a timer of the kernel that it winds up anew every time ends the
process. Time during which the whole process was stopped (SIGSTOP, a frozen container, a suspended
machine) does not count.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

log = logging.getLogger(__name__)

EXIT_HANG = 75
_STDERR_FD = 2
_MOVED_BYTES = 1 << 20

_libc = ctypes.CDLL(None)
_libc.sysv_signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.sysv_signal.restype = ctypes.c_void_p
_ALARM = ctypes.cast(_libc.alarm, ctypes.c_void_p)


class Watchdog:
    """Judges from samples of the step counter. *Pure.* Ask it several times per ``hang_ms``.

    Attributes:
        paused_ms: for how long it was not asked before the last time, if that was too long: then
            the engine could probably not run either, and it gets all of its time once more.
    """

    def __init__(self, hang_ms: int, now_ns: int) -> None:
        self._hang_ns = hang_ms * 1_000_000
        self._since_ns = now_ns
        self._asked_ns = now_ns
        self.paused_ms = 0
        self._steps = -1
        self._io_bytes = 0

    def hangs(self, steps: int, busy: bool, io_bytes: int, now_ns: int) -> bool:
        """Whether the engine has been busy without any movement for ``hang_ms``."""
        gap_ns, self._asked_ns = now_ns - self._asked_ns, now_ns
        self.paused_ms = gap_ns // 1_000_000 if 2 * gap_ns > self._hang_ns else 0
        moved = steps != self._steps or io_bytes - self._io_bytes >= _MOVED_BYTES
        if not busy or moved or self.paused_ms:
            self._since_ns, self._steps, self._io_bytes = now_ns, steps, io_bytes
            return False
        return now_ns - self._since_ns >= self._hang_ns

    def stuck_ms(self, now_ns: int) -> int:
        """For how long nothing has moved."""
        return (now_ns - self._since_ns) // 1_000_000


def io_bytes(path: Path = Path("/proc/self/io")) -> int:
    """Bytes that this process has read so far; 0 where the system does not tell."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(": ", 1) for line in lines if ": " in line)
    return int(values.get("rchar", 0)) + int(values.get("read_bytes", 0))


def wind_up(hang_ms: int) -> None:
    """Let the kernel end the process if this is not called again within twice ``hang_ms`` and 14
    seconds; after the former, say where every thread is.

    Needs no thread of ours to run. The timer also runs out while the process is stopped, so the
    first SIGALRM kills nobody: its handler is alarm(2) itself, which takes the signal's number for
    seconds, and holds for one signal only (that is how ``sysv_signal`` sets it). A process that
    goes on has these seconds to call again; one that hangs dies of the second SIGALRM.
    """
    faulthandler.dump_traceback_later(2 * hang_ms / 1000, exit=False, file=_STDERR_FD)
    _libc.sysv_signal(signal.SIGALRM, _ALARM)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, 2 * hang_ms / 1000)


def tell_crashes() -> None:
    """Say where every thread is when a library ends the process by a signal (a failed assertion,
    a wrong address): otherwise nobody can tell afterwards what it was at."""
    faulthandler.enable(file=_STDERR_FD, all_threads=True)


def unwind() -> None:
    """Stop the timer of :func:`wind_up`."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()


def give_up(stuck_ms: int, leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Say where every thread is and end the process: only a restart frees a hung device."""
    log.error("the engine has made no step for %d ms: leaving with code %d", stuck_ms, EXIT_HANG)
    faulthandler.dump_traceback(file=_STDERR_FD)
    leave(EXIT_HANG)
