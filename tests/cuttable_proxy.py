"""A piece of wire between a client and a broker, to be cut: forwards bytes between ipc sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path


class CuttableProxy:
    """Listens at ``path`` and forwards to the ipc endpoint ``target``.

    Attributes:
        connections: how many were made so far.
    """

    def __init__(self, path: Path, target: str) -> None:
        self.endpoint = f"ipc://{path}"
        self.connections = 0
        self._target = target.removeprefix("ipc://")
        self._cut_after_bytes: int | None = None
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CuttableProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

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

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                broker.connect(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open += [client, broker]
                self.connections += 1
            for source, sink, down in ((client, broker, False), (broker, client, True)):
                threading.Thread(
                    target=self._forward, args=(source, sink, down), daemon=True
                ).start()

    def _forward(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                limit = self._cut_after_bytes
                if not down or limit is None:
                    sink.sendall(data)
                elif len(data) < limit:
                    self._cut_after_bytes = limit - len(data)
                    sink.sendall(data)
                else:
                    self._cut_after_bytes = None
                    sink.sendall(data[:limit])
                    break
        # One end is gone: so is the other.
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
