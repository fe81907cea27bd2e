"""What tells the engine thread to leave: signals, and the end of the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator
from types import FrameType

from vram_conductor.protocol.errors import InvalidArgument
from vram_conductor.worker.loop import Inbox, Stop


@contextlib.contextmanager
def stop_signals(inbox: Inbox) -> Generator[None]:
    """SIGTERM and SIGINT become a request to drain."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        # SimpleQueue.put may be called from a signal handler.
        inbox.put(Stop(signal.Signals(number).name))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def watch_supervisor(fd: int | None, inbox: Inbox) -> None:
    """Drain when ``fd`` reads end of file.

    Raises:
        InvalidArgument: ``bad_config``: it is not open.
    """
    if fd is None:
        return
    try:
        os.fstat(fd)
    except OSError:
        raise InvalidArgument(
            "bad_config", f"--supervised-fd {fd} is not open; pass the read end of a pipe", fd=fd
        ) from None

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(fd, 4096):
                pass
        inbox.put(Stop("the supervisor is gone"))

    threading.Thread(target=watch, name="supervised", daemon=True).start()
