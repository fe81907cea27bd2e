"""A piece of wire to a broker, to be cut: forwards bytes between stream sockets, ipc or tcp."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class CuttableProxy:
    """Listens at ``path``, or without one at a loopback port, and forwards to ``target``.

    Attributes:
        endpoint: what to connect to.
        connections: how many were made so far. One that is lost may be followed by several: both
            libzmq and whoever owns its socket try again.
        cuts: how often ``cut_after`` has struck.
    """

    def __init__(self, path: Path | None, target: str) -> None:
        self.connections = 0
        self.cuts = 0
        self._target = target
        self._cut_after_bytes: int | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._flows = threading.Event()
        self._flows.set()
        self._down = False
        if path is None:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        else:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(path))
            self._listener.listen()
            self.endpoint = f"ipc://{path}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CuttableProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._flows.set()

    def cut(self) -> None:
        """Cut every connection now; new ones are welcome."""
        with self._lock:
            ends, self._open = self._open, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut_after(self, n_bytes: int) -> None:
        """Cut once so many more bytes went to the client, in the middle of whatever they are."""
        self._cut_after_bytes = n_bytes

    def go_down(self) -> None:
        """Cut every connection, and close new ones at once, until ``heal``."""
        self._down = True
        self.cut()

    def fall_silent(self) -> None:
        """Nothing passes until ``heal``, not even that a connection was closed; nothing is lost."""
        self._flows.clear()

    def heal(self) -> None:
        """The wire is whole again."""
        self._down = False
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = None if self._down else self._connect()
            if broker is None:
                client.close()
                continue
            with self._lock:
                self._open += [client, broker]
                self.connections += 1
            for source, sink, down in ((client, broker, False), (broker, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, down), daemon=True
                ).start()

    def _connect(self) -> socket.socket | None:
        kind, _, where = self._target.partition("://")
        try:
            if kind == "tcp":
                host, _, port = where.rpartition(":")
                return socket.create_connection((host, int(port)))
            broker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            broker.connect(where)
        except OSError:
            return None
        return broker

    def _forward(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                self._flows.wait()
                limit = self._cut_after_bytes
                if not down or limit is None:
                    sink.sendall(data)
                elif len(data) < limit:
                    self._cut_after_bytes = limit - len(data)
                    sink.sendall(data)
                else:
                    self._cut_after_bytes = None
                    self.cuts += 1
                    sink.sendall(data[:limit])
                    break
        self._flows.wait()
        # One end is gone: so is the other.
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
