"""One supervised process: started, watched, signalled, reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
STABLE_S = 60.0
"""A child that lived this long starts its back-off anew."""


def backoff_s(failures: int) -> float:
    """Pause before restart number ``failures`` (1, 2, …): doubles up to a bound. *Pure.*"""
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(30, max(0, failures - 1))))


class Child:
    """A process in a session of its own, so that a Ctrl-C in the terminal does not reach it.

    Args:
        name: for messages: ``broker``, ``worker cpu``.
        command: argv; more may be appended between two starts.

    Attributes:
        process: None before the first start.
        failures: consecutive early deaths.
        restarts: how often it was started again.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.command: list[str] = list(command)
        self.process: subprocess.Popen[bytes] | None = None
        self.failures: int = 0
        self.restarts = 0
        self._pidfd = -1
        self._started_s = 0.0
        self._again_s: float | None = None

    @property
    def pid(self) -> int:
        """Of the last process that was started; 0 before."""
        return self.process.pid if self.process else 0

    @property
    def alive(self) -> bool:
        """Whether it runs; one that has ended is reaped by asking."""
        return self.process is not None and self.process.poll() is None

    def start(
        self, life_fd: int, *, capture: bool, log: Path | None, env: Mapping[str, str] | None
    ) -> None:
        """Start it.

        Args:
            life_fd: read end of the pipe whose end of file means that its parent is gone.
            capture: its stdout is a pipe for the parent; else it goes where its stderr goes,
                for the parent's stdout is for the parent's results.
            log: file that its stderr is appended to; None: the parent's stderr.
        """
        self._forget()
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(log.open("ab")).fileno() if log else 2
            self.process = subprocess.Popen(
                [*self.command, "--supervised-fd", str(life_fd)],
                pass_fds=[life_fd],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if capture else stderr,
                stderr=stderr,
                env=env,
            )
        # A descriptor that becomes readable at its death; without it (an old kernel) we poll.
        with contextlib.suppress(OSError):
            self._pidfd = os.pidfd_open(self.process.pid)
        self._started_s, self._again_s = time.monotonic(), None

    @property
    def death_fd(self) -> int:
        """Becomes readable when it dies; -1 if there is no such thing here."""
        return self._pidfd

    def plan_restart(self) -> tuple[float, float]:
        """Note its death: (seconds that it lived, seconds until it is started again)."""
        now = time.monotonic()
        lived = now - self._started_s
        self.failures = 1 if lived > STABLE_S else self.failures + 1
        pause = backoff_s(self.failures)
        self._again_s = now + pause
        return lived, pause

    @property
    def restart_in_s(self) -> float | None:
        """Seconds until it is due again; None if no restart is planned."""
        return None if self._again_s is None else max(0.0, self._again_s - time.monotonic())

    @property
    def cause(self) -> str:
        """How it ended: ``SIGKILL``, ``exit code 70``."""
        code = self.process.returncode if self.process else None
        if code is None:
            return "still running"
        try:
            return signal.Signals(-code).name if code < 0 else f"exit code {code}"
        except ValueError:
            return f"signal {-code}"

    def terminate(self) -> None:
        """SIGTERM, if it runs."""
        if self.process is not None and self.alive:
            self.process.terminate()

    def kill(self) -> None:
        """SIGKILL, to what it has started in its session as well."""
        if self.process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Give back the descriptors. It is not started again."""
        self._forget()

    def _forget(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
