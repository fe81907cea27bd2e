"""A real broker that asks for keys over loopback tcp, and key files for its clients."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from broker_process import ECHO, BrokerProcess, end, until

from vram_conductor.client import Conductor
from vram_conductor.protocol.errors import ConductorError, Unauthenticated
from vram_conductor.protocol.key_files import KeyFolder, load_key, new_pair, save_key
from vram_conductor.protocol.keys import Key, KeyFile, Quota, Role

ANY_PORT = "tcp://127.0.0.1:0"


class Keys:
    """The keys of the broker whose folders are below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = KeyFolder(folder / "s" / "keys")
        self.pair = self.store.prepare()

    def new(
        self,
        name: str,
        role: Role = "owner",
        principal: str = "",
        created: str = "",
        devices: tuple[str, ...] = (),
        **quota: int,
    ) -> Path:
        """A key on the list; the path of its file."""
        path = self.stranger(name)
        file = load_key(path)
        key = Key(
            name=name,
            public=file.public,
            principal=principal or name,
            role=role,
            quota=Quota(**quota),
            devices=devices,
            created=created,
        )
        self.store.add(key)
        return path

    def stranger(self, name: str, broker: str = "") -> Path:
        """A well-formed key file that is not on the list. ``broker``: another broker's key."""
        pair, path = new_pair(), self.folder / f"{name}.key"
        file = KeyFile(
            name=name,
            principal=name,
            role="owner",
            public=pair.public,
            secret=pair.secret,
            broker=broker or self.pair.public,
        )
        save_key(path, file)
        return path

    def revoke(self, name: str) -> None:
        self.store.revoke(name, "2030-01-01T00:00:00Z")


class KeyedBroker(BrokerProcess):
    """Both ROUTERs over loopback tcp, with keys."""

    def __init__(self, folder: Path, *flags: str, enter: Sequence[str] = ()) -> None:
        self.keys = Keys(folder)
        tcp = ("--clients", ANY_PORT, "--workers", ANY_PORT)
        super().__init__(folder, *tcp, *flags, enter=enter)

    def conductor(self, key: Path | None, connect_timeout_s: float = 5.0, **how: Any) -> Conductor:
        """A connected client with that key file; closed at the end."""
        client = Conductor(
            self.endpoints["clients"],
            key=key or "",
            connect_timeout_s=connect_timeout_s,
            **how,
        )
        self.stack.callback(client.close)
        return client

    def refusal(
        self, key: Path | None, connect_timeout_s: float = 5.0
    ) -> tuple[ConductorError, float]:
        """What a client with that key is told, and after how many seconds."""
        began_s = time.monotonic()
        try:
            self.conductor(key, connect_timeout_s)
        except ConductorError as error:
            return error, time.monotonic() - began_s
        raise AssertionError("it was let in")

    def keyed_echo(self, rate: float = 0.0, name: str = "echo") -> subprocess.Popen[bytes]:
        """An echo worker with a key of its own, welcomed by the broker."""
        key = self.keys.new(name, "worker")
        until_in(self, self.keys.new(f"{name}-is-known", "observer")).close()
        command = [sys.executable, str(ECHO), "--workers", self.endpoints["workers"]]
        command += ["--rate", str(rate), "--key", str(key)]
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self.stack.callback(end, worker)
        until(lambda: self.worker_epoch() is not None, "the worker is welcomed")
        return worker

    def worker_epoch(self) -> int | None:
        """Which worker serves the device now."""
        if not (self.folder / "watcher.key").exists():
            self.keys.new("watcher", "observer")
            self.watcher = until_in(self, self.folder / "watcher.key")
        devices = self.watcher.status().devices
        worker = devices[0].worker if devices else None
        return None if worker is None else worker.worker_epoch


def until_in(broker: KeyedBroker, key: Path) -> Conductor:
    """A client whose key the broker may not have read yet."""
    found: list[Conductor] = []

    def enter() -> bool:
        with suppress(Unauthenticated):
            found.append(broker.conductor(key))
        return bool(found)

    until(enter, "the broker sees the new key")
    return found[0]
