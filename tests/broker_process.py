"""Starts a real broker, echo workers and raw clients for tests, and makes sure that they end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import zmq

from vram_conductor.protocol import codec, limits, sockets
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import (
    Accepted,
    Decode,
    Done,
    Error,
    Hello,
    List,
    Ok,
    Ping,
    Pong,
    Register,
    Status,
    Tokens,
    Welcome,
)
from vram_conductor.protocol.status import AgentList, AgentStatus, StatusReport
from vram_conductor.protocol.values import Usage

ECHO = Path(__file__).resolve().parents[1] / "bench" / "echo_worker.py"
WAIT_S = 30.0
WAIT_MS = 30_000
M = TypeVar("M")


class BrokerProcess:
    """``python -m vram_conductor.broker`` with private folders below ``folder``.

    Args:
        folder: short (ipc paths have at most 107 characters); a second process with the same
            one is a restart.
        flags: appended to the command.
        env: laid over the environment.
        code: Python source to run instead of the module; it gets the flags as sys.argv.
        enter: what the command begins with, to run it elsewhere (``network.Host.enter``).
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        code: str = "",
        own_folders: bool = True,
        enter: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.stack = ExitStack()
        self.context: zmq.Context[sockets.Socket] = zmq.Context()
        self.stack.callback(self.context.term)
        self._log = (folder / f"broker-{time.monotonic_ns()}.log").open("w+b")
        self.stack.callback(self._log.close)
        life_r, self.life_w = os.pipe()
        self.stack.callback(self.abandon)
        what = ["-c", code] if code else ["-m", "vram_conductor.broker"]
        command = [*enter, sys.executable, *what]
        command += ["--print-endpoints", "--supervised-fd", str(life_r)]
        if own_folders:
            command += ["--runtime-dir", str(folder / "r"), "--state-dir", str(folder / "s")]
        self.process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=[life_r],
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        os.close(life_r)
        assert self.process.stdout is not None
        self.stack.callback(self.process.stdout.close)
        line = self.process.stdout.readline()
        self.endpoints: dict[str, str] = json.loads(line) if line else {}

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    @property
    def rss_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def limit_files(self, most_bytes: int) -> None:
        """No file of the process may grow beyond this: a disk that is full (or not any more)."""
        limits_bytes = (most_bytes, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits_bytes)

    def client(self, *, hello: bool = True, hwm: int = sockets.HWM) -> RawClient:
        """A connected raw client, by default with a session."""
        client = RawClient(sockets.connect(self.context, self.endpoints["clients"], hwm=hwm))
        self.stack.callback(client.socket.close, 0)
        assert client.socket.poll(WAIT_MS, zmq.POLLOUT)
        if hello:
            client.hello()
        return client

    def echo(
        self, rate: float = 0.0, device: str = "cpu", *, outlive: bool = False
    ) -> subprocess.Popen[bytes]:
        """An echo worker that the broker has welcomed.

        Args:
            outlive: leave it running at the end of the block; the caller ends it.
        """
        command = [sys.executable, str(ECHO), "--workers", self.endpoints["workers"]]
        command += ["--rate", str(rate), "--device", device]
        worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        if not outlive:
            self.stack.callback(end, worker)
        client = self.client()
        until(lambda: device in client.workers(), "the worker is welcomed")
        client.socket.close(0)
        return worker

    def abandon(self) -> None:
        """Close the supervisor's pipe, as the kernel does for one that was killed. Idempotent."""
        if self.life_w >= 0:
            os.close(self.life_w)
            self.life_w = -1

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(WAIT_S)

    def __enter__(self) -> BrokerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            sys.stderr.write(self.log)
        if self.process.poll() is None:
            self.kill()
        self.stack.close()


class RawClient:
    """A client without our client library: one socket and the codec."""

    def __init__(self, socket: sockets.Socket) -> None:
        self.socket = socket
        self.welcome: Welcome | None = None

    def send(self, message: Any) -> None:
        self.socket.send_multipart(codec.CLIENT_TO_BROKER.encode(message))

    def receive(self, wait_ms: int = WAIT_MS) -> Any:
        assert self.socket.poll(wait_ms), "the broker is silent"
        return codec.BROKER_TO_CLIENT.decode(self.socket.recv_multipart())[0]

    def expect(self, kind: type[M], rid: bytes | None = None) -> M:
        """The next message of a kind; others before it are skipped, an ERROR is shown."""
        wants_error = bool(kind is Error)
        while True:
            message = self.receive()
            if isinstance(message, kind) and (rid is None or getattr(message, "rid", b"") == rid):
                return message
            assert wants_error or not isinstance(message, Error), message

    def hello(self) -> Welcome:
        self.send(Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR), client="test"))
        self.welcome = self.expect(Welcome)
        return self.welcome

    def ping(self) -> None:
        self.send(Ping(n=42))
        self.expect(Pong)

    def status(self) -> StatusReport:
        rid = new_rid()
        self.send(Status(rid=rid))
        return msgspec.convert(self.expect(Ok, rid).body, StatusReport)

    def workers(self) -> set[str]:
        return {device.device for device in self.status().devices if device.worker is not None}

    def agents(self) -> list[AgentStatus]:
        rid = new_rid()
        self.send(List(rid=rid))
        return msgspec.convert(self.expect(Ok, rid).body, AgentList).agents

    def register(self, agent: str, **fields: Any) -> dict[str, Any]:
        rid = new_rid()
        fields = {"model": "echo", "n_ctx": 4096, **fields}
        self.send(Register(rid=rid, agent=agent, **fields))
        return self.expect(Ok, rid).body

    def decode(self, agent: str, pieces: int = 16, **fields: Any) -> bytes:
        """Send a DECODE; returns its rid."""
        rid = new_rid()
        self.send(Decode(rid=rid, agent=agent, tokens=[1, 2, 3], max_tokens=pieces, **fields))
        return rid

    def result(self, rid: bytes) -> tuple[list[Tokens], Usage | ErrorInfo]:
        """Everything that a job says, to its end."""
        pieces: list[Tokens] = []
        while True:
            message = self.receive()
            if getattr(message, "rid", None) != rid or isinstance(message, Accepted):
                continue
            if isinstance(message, Done):
                return pieces, message.usage
            if isinstance(message, Error):
                return pieces, message.error
            assert isinstance(message, Tokens)
            assert message.seq == len(pieces), "a gap or a double in the stream"
            pieces.append(message)

    def usage(self, rid: bytes) -> Usage:
        """The receipt of a job that ends well."""
        _, end = self.result(rid)
        assert isinstance(end, Usage), end
        return end


def end(process: subprocess.Popen[Any]) -> None:
    """Kill and wait. Idempotent."""
    process.kill()
    process.wait(WAIT_S)


def until(true: Callable[[], bool], what: str) -> None:
    """Poll with a deadline."""
    give_up_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < give_up_s, f"it never happened: {what}"
        threading.Event().wait(0.005)
