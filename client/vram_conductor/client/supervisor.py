"""Starts the broker and the workers of one box, and starts them again when they die.

The children watch a pipe from here: when this process dies, however it dies, they read EOF and
leave (``--supervised-fd``). Nothing of them is imported.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vram_conductor.client.child import Child
from vram_conductor.protocol.errors import Unavailable

TERM_GRACE_S = 5.0
"""How long a child may ignore SIGTERM before SIGKILL."""

BROKER_READY_S = 60.0
"""A long journal takes a while to read."""

FINAL_EXIT_CODES = frozenset({2, 64, 65, 69, 78})
"""Usage, data or configuration errors (sysexits.h): starting again cannot help."""

PUZZLING_FAILURES = 3
"""So many early deaths in a row, and the news say where to look."""

_POLL_S = 0.05
"""Without pidfd."""


class Supervisor:
    """Owns the processes of one box.

    Args:
        config: path of the configuration file, or None for defaults.
        devices: ids of the devices whose workers are started here.
        broker_args, worker_args: more flags for them.
        drain_s: how long a stop waits for what runs, in seconds.
        log: file that the children's stderr goes to; None: this process's own.
        env: their environment; None: this process's own.
        say: where one-line news for a person go; called in the thread of ``start`` or ``run``.

    Attributes:
        endpoints: of the broker, once it is up.
        env: what a child gets that is started from now on; None: this process's own.
    """

    def __init__(
        self,
        config: Path | None,
        devices: Sequence[str],
        *,
        broker_args: Sequence[str] = (),
        worker_args: Sequence[str] = (),
        drain_s: float = 10.0,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        base = ["--config", str(config)] if config else []
        python = [sys.executable, "-m"]
        self._say, self._drain_s, self._log = say, drain_s, log
        self.env: dict[str, str] | None = None if env is None else dict(env)
        self._broker = Child(
            "broker",
            [*python, "vram_conductor.broker", *base, *broker_args, "--print-endpoints"],
        )
        self._worker_command = [*python, "vram_conductor.worker", *base, *worker_args]
        self._devices = devices
        self._workers: list[Child] = []
        # The write end lives here; its closing tells every child that we are gone.
        self._life_r, self._life_w = os.pipe()
        self._wake_r, self._wake_w = os.pipe()
        for fd in (self._wake_r, self._wake_w):
            os.set_blocking(fd, False)
            # Not in shutdown: a late stop() would write into whatever has the number by then.
            weakref.finalize(self, os.close, fd)
        self._stops = 0
        self._closing = threading.Lock()
        self._closed = False
        self.endpoints: dict[str, str] = {}

    @property
    def children(self) -> list[Child]:
        """The broker, then the workers."""
        return [self._broker, *self._workers]

    def start(self) -> dict[str, str]:
        """Start the broker, wait until it is bound, start the workers.

        Returns:
            The broker's endpoints, ``{"clients": …, "workers": …}``; empty if :meth:`stop` was
            called meanwhile.

        Raises:
            Unavailable: ``broker_failed``: it ended or stayed silent; ``details["exit_code"]``.
        """
        self._spawn(self._broker, capture=True)
        self.endpoints = self._read_endpoints()
        if not self.endpoints:
            return {}
        # A broker on tcp port 0 would come back elsewhere: pin it to where it is now.
        self._broker.command.remove("--print-endpoints")
        for name in ("clients", "workers"):
            self._broker.command += [f"--{name}", self.endpoints[name]]
        for device in self._devices:
            command = [*self._worker_command, "--device", device]
            child = Child(f"worker {device}", [*command, "--workers", self.endpoints["workers"]])
            self._workers.append(child)
            self._spawn(child)
        return self.endpoints

    def run(self) -> int:
        """Supervise until :meth:`stop` or a child that cannot be helped.

        Returns:
            0 after a stop, else the exit code of the child that gave up.
        """
        code = 0
        while not self._stops and code == 0:
            pause_s = 60.0
            living: list[Child] = []
            for child in self.children:
                if not child.alive and (code := self._look_after(child)):
                    break
                if child.restart_in_s is None:
                    living.append(child)
                else:
                    pause_s = min(pause_s, child.restart_in_s)
            else:
                self._wait(pause_s, living)
        self.shutdown()
        return code

    def stop(self) -> bool:
        """Ask :meth:`run` to shut everything down; once more: without waiting for anything.

        Safe in a signal handler and in any thread. True if it was the first time.
        """
        self._stops += 1
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")
        return self._stops == 1

    def shutdown(self) -> None:
        """Broker first: it drains, the workers park everything and leave; then make sure.
        Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._broker.terminate()
            self._wait_gone([self._broker], self._drain_s + TERM_GRACE_S)
            for child in self.children:
                child.terminate()
            self._wait_gone(self.children, TERM_GRACE_S)
            self._kill_all()
            for child in self.children:
                child.close()
            for fd in (self._life_w, self._life_r):
                os.close(fd)

    # --- parts --------------------------------------------------------------------------------

    def _spawn(self, child: Child, *, capture: bool = False) -> None:
        child.start(self._life_r, capture=capture, log=self._log, env=self.env)

    def _read_endpoints(self) -> dict[str, str]:
        process = self._broker.process
        assert process is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout.fileno(), self._wake_r], [], [], BROKER_READY_S)
        if self._stops:
            return {}
        line = process.stdout.readline() if ready else b""
        if line:
            return dict(json.loads(line))
        why = "it gave up" if ready else f"it said nothing for {BROKER_READY_S:.0f} s"
        if not ready:
            self._broker.kill()
        code = process.wait()
        raise Unavailable(
            "broker_failed",
            f"the broker did not come up: {why} (exit code {code}); {self._look()}",
            exit_code=code,
        )

    def _look(self) -> str:
        return f"its message is in {self._log}" if self._log else "its message is above"

    def _look_after(self, child: Child) -> int:
        """A dead child: plan its restart, start it when it is due; or return the exit code that
        says that this cannot help."""
        if child.restart_in_s is None:
            assert child.process is not None
            code = child.process.returncode
            if code in FINAL_EXIT_CODES:
                self._say(f"{child.name} gave up (exit code {code}); {self._look()}")
                return int(code)
            lived_s, pause_s = child.plan_restart()
            self._say(
                self._obituary(child, lived_s, pause_s)
                if code
                else f"{child.name} (pid {child.pid}) has left: starting its successor"
            )
        elif child.restart_in_s == 0.0:
            child.restarts += 1
            self._spawn(child)
        return 0

    def _obituary(self, child: Child, lived_s: float, pause_s: float) -> str:
        hint = ""
        if child.failures >= PUZZLING_FAILURES:
            hint = f" ({child.failures} times in a row; {self._look()}, `conductor doctor` helps)"
        return (
            f"{child.name} (pid {child.pid}) died after {lived_s:.1f} s: {child.cause}; "
            f"starting it again in {pause_s:.2f} s{hint}"
        )

    def _wait_gone(self, children: Sequence[Child], timeout_s: float) -> None:
        """Until all of them have ended, or the time is over, or a second stop."""
        until = time.monotonic() + timeout_s
        while living := [child for child in children if child.alive]:
            left_s = until - time.monotonic()
            if left_s <= 0 or self._stops > 1:
                return
            self._wait(left_s, living)

    def _kill_all(self) -> None:
        stubborn = [child for child in self.children if child.alive]
        for child in stubborn:
            if self._stops < 2:
                self._say(f"{child.name} (pid {child.pid}) ignores SIGTERM: killing it")
            child.kill()
        until = time.monotonic() + TERM_GRACE_S
        while any(child.alive for child in stubborn) and time.monotonic() < until:
            time.sleep(_POLL_S / 5)
        for child in stubborn:
            if child.alive:
                self._say(
                    f"{child.name} (pid {child.pid}) survives SIGKILL: it hangs in the kernel "
                    "and may still hold its device"
                )

    def _wait(self, timeout_s: float, living: Sequence[Child]) -> None:
        """Sleep; wake when one of ``living`` has died since it was looked at, or on stop()."""
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        for child in living:
            if child.death_fd < 0:
                timeout_s = min(timeout_s, _POLL_S)
            else:
                poll.register(child.death_fd, select.POLLIN)
        poll.poll(1000 * timeout_s)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_r, 64):
                pass
