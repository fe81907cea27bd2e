"""Tells who started ``conductor up`` when the workers are ready: that takes a while."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from vram_conductor.client.sync import Conductor
from vram_conductor.protocol.errors import ConductorError

POLL_S = 0.2
LEAVE_S = 2.0
NEXT = "next, in another terminal: conductor register NAME --model MODEL"


class UpNews:
    """Says where the broker is, then of every device when its worker is ready.

    A worker that gives up or is started again is the supervisor's news.

    Args:
        endpoints: of the broker.
        devices: whose workers are started here; none: nothing is waited for.
        say: called here, and later in a thread of this object.
        key: key file, for a broker over tcp.
    """

    def __init__(
        self,
        endpoints: Mapping[str, str],
        devices: Sequence[str],
        say: Callable[[str], None],
        key: str = "",
    ) -> None:
        self._endpoint, self._say, self._key = endpoints["clients"], say, key
        self._waiting, self._first = list(devices), True
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="up-news", daemon=True)
        what = "the broker is up" if devices else "conductor is up"
        named = ", ".join(devices) or "none here: start them with conductor worker"
        lines = [
            f"{what}, pid {os.getpid()}; Ctrl-C stops it",
            f"  clients  {endpoints['clients']}",
            f"  workers  {endpoints['workers']}",
            f"  devices  {named}",
            f"waiting for the worker of {', '.join(devices)} …" if devices else NEXT,
        ]
        say("\n".join(lines))
        if devices:
            self._thread.start()

    def close(self) -> None:
        """Say no more. Idempotent."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(LEAVE_S)

    def _watch(self) -> None:
        while self._waiting and not self._over.is_set():
            try:
                with Conductor(
                    self._endpoint, key=self._key, client="conductor up", reconnect_s=1.0
                ) as conductor:
                    self._ask(conductor)
            except ConductorError:
                # A broker that went away is started again by the supervisor.
                self._over.wait(POLL_S)

    def _ask(self, conductor: Conductor) -> None:
        while self._waiting and not self._over.is_set():
            report = conductor.status()
            if report.draining:
                self._over.set()
                return
            for device in report.devices:
                if device.worker is not None and device.device in self._waiting:
                    self._waiting.remove(device.device)
                    start, end = ("conductor is up: ", f"\n{NEXT}") if self._first else ("", "")
                    self._say(f"{start}the worker of {device.device} is ready{end}")
                    self._first = False
            if self._waiting:
                self._over.wait(POLL_S)
