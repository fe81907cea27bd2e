"""A program in a terminal of its own: what it draws there, and the keys that are pressed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

PATIENCE_S = 60.0
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Terminal:
    """``command`` with all three streams on a terminal of ``columns`` x ``rows``.

    Attributes:
        raw: all that was written so far, escape sequences included.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._fd, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        whole = {**os.environ, "TERM": "xterm", **(env or {})}
        whole.pop("COLUMNS", None)
        whole.pop("LINES", None)
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=whole,
            start_new_session=True,
            # So that Ctrl-C typed there is a SIGINT here.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)
        self.raw = ""

    @property
    def text(self) -> str:
        """What was written, without escape sequences and carriage returns."""
        return _ESCAPE.sub("", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    def read(self, timeout_s: float = 0.05) -> bool:
        """Take in what has come; False at the end."""
        ready, _, _ = select.select([self._fd], [], [], timeout_s)
        if not ready:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux says so when the last user of the terminal has gone
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def expect(self, text: str) -> None:
        """Wait until ``text`` was written."""
        until = time.monotonic() + PATIENCE_S
        while text not in self.text:
            assert self.read(), f"it ended without {text!r}:\n{self.text}"
            assert time.monotonic() < until, f"no {text!r} within {PATIENCE_S} s:\n{self.text}"

    def press(self, keys: str) -> None:
        """Type; ``\\x03`` is Ctrl-C."""
        os.write(self._fd, keys.encode())

    def wait(self) -> int:
        """Until it ends; the exit code."""
        until = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < until, f"it does not end:\n{self.text}"
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._fd)
