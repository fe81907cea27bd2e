"""A private conductor in temporary folders: broker, workers, supervisor, gone at the end.

The demo, the benches and the integration tests run on it; it is the same code path as
``conductor up`` with another configuration file.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from vram_conductor.client.supervisor import Supervisor
from vram_conductor.client.sync import Conductor
from vram_conductor.protocol.config import ENV_PREFIX, SleepMode
from vram_conductor.protocol.errors import Unavailable

SHARED_MEMORY = Path("/dev/shm")
READY_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True)
class StageDevice:
    """A device of the stage; sizes in bytes, ``capacity_bytes`` 0 on cuda: the whole card."""

    id: str = "cpu"
    capacity_bytes: int = 1 << 30
    host_cap_bytes: int = 1 << 30
    mode: str = "reserve"
    threads: int = 0
    kind: str = "cpu"
    sleep: SleepMode = "auto"

    def section(self) -> str:
        """Its section of the configuration file."""
        return (
            f'[[device]]\nid = "{self.id}"\nkind = "{self.kind}"\n'
            f"capacity = {self.capacity_bytes}\n"
            f'host_cap = {self.host_cap_bytes}\nmode = "{self.mode}"\nthreads = {self.threads}\n'
            f'sleep = "{self.sleep}"\n'
        )


def private_environment(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` without what would lay itself over the stage's own configuration. What experiments
    with the preload library set is none of that."""
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(ENV_PREFIX) or name.startswith(f"{ENV_PREFIX}VMM_")
    }


class Stage:
    """Context manager around a running system.

    Args:
        devices: what to serve on.
        worker, broker: more lines for the sections of these names, in TOML.
        say: where the supervisor's news go.

    Attributes:
        endpoint: where clients connect.
        config: path of the configuration file.
        arena_dir: where this stage's parked states are.
        log: what broker and workers write on stderr.
        keep: set it, and ``folder`` (log, configuration, journal) outlives the stage.
    """

    def __init__(
        self,
        devices: Sequence[StageDevice] = (StageDevice(),),
        *,
        worker: str = "",
        broker: str = "",
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        # ipc paths must stay below 108 bytes, so a deep TMPDIR is not used for them.
        self.folder: Path = Path(tempfile.mkdtemp(prefix="vmc-", dir="/tmp"))
        base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else self.folder
        self.arena_dir: Path = base / f"vmc-{secrets.token_hex(6)}"
        self.config: Path = self.folder / "conductor.toml"
        self.config.write_text(self._text(devices, worker, broker))
        self.log: Path = self.folder / "log"
        self.keep = False
        self.supervisor: Supervisor = Supervisor(
            self.config,
            [device.id for device in devices],
            log=self.log,
            env=private_environment(os.environ),
            say=say,
        )
        self._thread: threading.Thread | None = None
        self.endpoint: str = ""

    def _text(self, devices: Sequence[StageDevice], worker: str, broker: str) -> str:
        run, state = self.folder / "run", self.folder / "state"
        parts = [
            f"[broker]\nruntime_dir = {json.dumps(str(run))}\n"
            f"state_dir = {json.dumps(str(state))}\n{broker}\n",
            f"[worker]\narena_dir = {json.dumps(str(self.arena_dir))}\n{worker}\n",
            *(device.section() for device in devices),
        ]
        return "\n".join(parts)

    def start(self) -> Self:
        """Start everything; every device has its worker when this returns.

        Raises:
            Unavailable: ``broker_failed``, ``no_worker``.
        """
        try:
            self.endpoint = self.supervisor.start()["clients"]
        except BaseException:
            self.supervisor.shutdown()
            if self.log.exists():
                sys.stderr.write(self.log.read_text(errors="replace"))
            self._clean()
            raise
        self._thread = threading.Thread(target=self.supervisor.run, name="supervisor", daemon=True)
        self._thread.start()
        try:
            self._wait_for_workers()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_for_workers(self) -> None:
        until = time.monotonic() + READY_S
        with Conductor(self.endpoint, client="stage") as conductor:
            while any(device.worker is None for device in conductor.status().devices):
                if time.monotonic() > until:
                    raise Unavailable(
                        "no_worker",
                        f"a worker did not come up within {READY_S:.0f} s; see {self.log}",
                    )
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Drain, stop every process, remove the folders. Idempotent."""
        self.supervisor.stop()
        if self._thread is not None:
            self._thread.join()
        self._clean()

    def _clean(self) -> None:
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        # Parked states take main memory: these always go.
        shutil.rmtree(self.arena_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
