"""Starts the broker and the workers of one box, and starts them again when they die.

Children run in a session of their own and watch a pipe from here: when this process dies, however
it dies, they read EOF and leave (``--supervised-fd``). Nothing of them is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vram_conductor.protocol.errors import Unavailable

BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 30.0
STABLE_S = 60.0
"""A child that lived this long starts its back-off anew."""

TERM_GRACE_S = 5.0
"""How long a child may ignore SIGTERM before SIGKILL."""

BROKER_READY_S = 20.0
FINAL_EXIT_CODES = frozenset({2, 64, 69, 78})
"""Usage or configuration errors (sysexits.h): starting again cannot help."""


def backoff_s(failures: int) -> float:
    """Pause before restart number ``failures`` (1, 2, …): doubles up to a bound."""
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** max(0, failures - 1)))


@dataclass
class Child:
    """One supervised process.

    Attributes:
        name: for messages: ``broker``, ``worker cpu``.
        command: argv without ``--supervised-fd``.
        failures: consecutive early deaths.
        restarts: how often it was started again.
    """

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    not_before_s: float = 0.0
    failures: int = 0
    restarts: int = 0


class Supervisor:
    """Owns the processes of one box.

    Args:
        config: path of the configuration file, or None for defaults.
        devices: ids of the devices whose workers are started here.
        broker_args, worker_args: more flags for them.
        drain_s: how long a stop waits for what runs, in seconds.
        log: file that the children's stderr goes to; None: this process's own.
        say: where one-line news for a person go.
    """

    def __init__(
        self,
        config: Path | None,
        devices: list[str],
        *,
        broker_args: list[str] | None = None,
        worker_args: list[str] | None = None,
        drain_s: float = 10.0,
        log: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        base = ["--config", str(config)] if config else []
        self._say = say
        self._drain_s = drain_s
        self._log = log
        self._worker_base = [*base, *(worker_args or [])]
        self._devices = devices
        self._broker = Child(
            "broker",
            [sys.executable, "-m", "vram_conductor.broker", *base, *(broker_args or [])],
        )
        self._workers: list[Child] = []
        # The write end lives here; its closing tells every child that we are gone.
        self._life_r, self._life_w = os.pipe()
        self.endpoints: dict[str, str] = {}
        self._stop = False

    @property
    def children(self) -> list[Child]:
        return [self._broker, *self._workers]

    def start(self) -> dict[str, str]:
        """Start the broker, wait until it is bound, start the workers.

        Returns:
            The broker's endpoints, ``{"clients": …, "workers": …}``.

        Raises:
            Unavailable: ``broker_failed``: it ended or stayed silent; its own message is on stderr.
        """
        self._broker.command.append("--print-endpoints")
        self._spawn(self._broker, capture=True)
        self.endpoints = self._read_endpoints()
        for device in self._devices:
            command = [sys.executable, "-m", "vram_conductor.worker", *self._worker_base]
            command += ["--device", device, "--workers", self.endpoints["workers"]]
            child = Child(f"worker {device}", command)
            self._workers.append(child)
            self._spawn(child)
        return self.endpoints

    def run(self) -> int:
        """Supervise until :meth:`stop` or a child that cannot be helped.

        Returns:
            0 after a clean stop, else the exit code of the child that gave up.
        """
        code = 0
        while not self._stop:
            for child in self.children:
                given_up = self._look_after(child)
                if given_up is not None:
                    code, self._stop = given_up, True
            self._wait_for_any(0.2)
        self.shutdown()
        return code

    def stop(self) -> None:
        """Ask :meth:`run` to shut everything down; safe in a signal handler."""
        self._stop = True

    def shutdown(self) -> None:
        """Broker first: it drains, the workers park everything and leave; then make sure."""
        self._signal(self._broker, signal.SIGTERM)
        self._wait_all([self._broker], self._drain_s + TERM_GRACE_S)
        for child in self.children:
            self._signal(child, signal.SIGTERM)
        self._wait_all(self.children, TERM_GRACE_S)
        for child in self.children:
            if self._alive(child):
                self._say(f"{child.name} ignores SIGTERM for {TERM_GRACE_S:.0f} s: killing it")
                self._signal(child, signal.SIGKILL)
        self._wait_all(self.children, TERM_GRACE_S)
        with contextlib.suppress(OSError):
            os.close(self._life_w)
        with contextlib.suppress(OSError):
            os.close(self._life_r)

    # --- one child ----------------------------------------------------------------------------

    def _spawn(self, child: Child, *, capture: bool = False) -> None:
        # The life pipe's read end is inherited; start_new_session keeps a Ctrl-C in the terminal
        # from reaching the children before the drain has begun.
        with contextlib.ExitStack() as stack:
            stderr = stack.enter_context(self._log.open("ab")) if self._log else None
            child.process = subprocess.Popen(
                [*child.command, "--supervised-fd", str(self._life_r)],
                pass_fds=[self._life_r],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if capture else None,
                stderr=stderr,
            )
        child.started_s = time.monotonic()

    def _read_endpoints(self) -> dict[str, str]:
        process = self._broker.process
        assert process is not None
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if selector.select(BROKER_READY_S):
                line = process.stdout.readline()
                if line:
                    return dict(json.loads(line))
        # It is not coming up: do not leave it behind half-started.
        process.kill()
        code = process.wait()
        raise Unavailable(
            "broker_failed",
            f"the broker did not come up (exit code {code}); its message is above",
            exit_code=code,
        )

    def _look_after(self, child: Child) -> int | None:
        """Restart a dead child when its pause is over; an exit code if it cannot be helped."""
        if child.process is None or child.process.poll() is None:
            return None
        now = time.monotonic()
        if child.not_before_s == 0.0:
            code = child.process.returncode
            if code in FINAL_EXIT_CODES:
                self._say(f"{child.name} gave up (exit code {code}); its message is above")
                return code
            lived = now - child.started_s
            child.failures = 1 if lived > STABLE_S else child.failures + 1
            pause = backoff_s(child.failures)
            child.not_before_s = now + pause
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            self._say(f"{child.name} died after {lived:.1f} s ({cause}); again in {pause:.2f} s")
        if now >= child.not_before_s:
            child.not_before_s = 0.0
            child.restarts += 1
            self._respawn(child)
        return None

    def _respawn(self, child: Child) -> None:
        if child is not self._broker:
            self._spawn(child)
            return
        # A broker on tcp port 0 would come back elsewhere: pin it to where it was.
        pinned = ["--clients", self.endpoints["clients"], "--workers", self.endpoints["workers"]]
        if pinned[1] not in child.command:
            child.command += pinned
        self._spawn(child, capture=True)

    @staticmethod
    def _alive(child: Child) -> bool:
        return child.process is not None and child.process.poll() is None

    def _signal(self, child: Child, number: signal.Signals) -> None:
        if child.process is not None and self._alive(child):
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    def _wait_all(self, children: list[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(self._alive(child) for child in children) and time.monotonic() < deadline:
            self._wait_for_any(0.02)

    @staticmethod
    def _wait_for_any(timeout_s: float) -> None:
        """Sleep, but wake at once when a child dies (Linux delivers SIGCHLD)."""
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        try:
            signal.sigtimedwait([signal.SIGCHLD], timeout_s)
        except InterruptedError:
            pass
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
