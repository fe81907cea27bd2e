"""Dry runs in a child process: a file that crashes llama.cpp takes nobody with it.

llama.cpp checks most of what it reads, but some broken or unusual files end in an assertion,
which aborts the process. So the first look at a file, and on cpu every dry run, happens in a
child of low priority that sees no GPU. It lives as long as the engine, is started again after a
crash, and exits when its standard input closes.

Wire: 4 bytes length (little endian), one msgpack map; one reply per request.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

import msgspec

from vram_conductor.protocol.errors import (
    ConductorError,
    ErrorInfo,
    Internal,
    InvalidArgument,
    Unavailable,
    error_from_info,
)
from vram_conductor.protocol.values import ModelInfo, PoolShape
from vram_conductor.worker.engine import Estimate
from vram_conductor.worker.llama.options import EngineOptions

DEADLINE_S = 120.0
"""A dry run that takes longer is killed; the largest vocabulary takes about a second."""

_CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGBUS, signal.SIGILL}
_ABORT_TEXT_BYTES = 400


class Ask(msgspec.Struct, frozen=True):
    """A request: describe the model, or estimate a pool where ``shape`` is given."""

    path: str
    name: str
    shape: PoolShape | None = None
    n_ctx: int = 0
    fit_bytes: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """Exactly one of the three is set."""

    info: ModelInfo | None = None
    estimate: Estimate | None = None
    error: ErrorInfo | None = None


class _Died(Exception):
    """The child ended; carries the signal (0 if it exited) and its last words."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)
        self.number = number
        self.words = words


class DryRunProcess:
    """Asks a child for estimates. Thread-safe; one request at a time."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None

    def start(self) -> None:
        """Start the child ahead of the first request; it needs half a second to import."""
        with self._lock:
            self._running()

    def describe(self, path: str, name: str) -> ModelInfo:
        """First look at a file. Raises what ``engine.Estimator`` raises."""
        try:
            answer = self._ask(Ask(path, name))
        except _Died as died:
            if died.number in _CRASHES:
                raise InvalidArgument(
                    "bad_model",
                    f"{path} makes llama.cpp crash ({_name(died.number)}): {died.words}; "
                    "get the file again, or choose another",
                    path=path,
                ) from None
            raise _failed(died) from None
        assert answer.info is not None
        return answer.info

    def estimate(
        self, path: str, name: str, shape: PoolShape, n_ctx: int, fit_bytes: int | None
    ) -> Estimate:
        """See ``engine.Estimator``."""
        self.describe(path, name)
        try:
            answer = self._ask(Ask(path, name, shape, n_ctx, fit_bytes))
        except _Died as died:
            raise _failed(died) from None
        assert answer.estimate is not None
        return answer.estimate

    def close(self) -> None:
        """End the child. Idempotent."""
        with self._lock:
            self._stop()

    def _ask(self, ask: Ask) -> Answer:
        with self._lock:
            child = self._running()
            try:
                _send(child, msgspec.msgpack.encode(ask))
                answer = msgspec.msgpack.decode(_receive(child), type=Answer)
            except (OSError, EOFError, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                raise _Died(*self._stop(kill=late)) from None
        if answer.error is not None:
            raise error_from_info(answer.error)
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._stop()
        if self._child is None:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vram_conductor.worker.llama.dryrun_main",
                    msgspec.json.encode(self._options).decode(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "GGML_NO_BACKTRACE": "1"},
                start_new_session=True,
            )
        return self._child

    def _stop(self, *, kill: bool = False) -> tuple[int, str]:
        """End and reap the child; returns its signal and the end of its error output."""
        child, stderr = self._child, self._stderr
        self._child = self._stderr = None
        if child is None or stderr is None:
            return 0, ""
        assert child.stdin is not None
        assert child.stdout is not None
        if kill:
            child.kill()
        child.stdin.close()
        child.stdout.close()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        with stderr:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _ABORT_TEXT_BYTES))
            words = " ".join(stderr.read().decode("utf-8", "replace").split())
            words = re.sub(r"/\S*/", "", words)  # the folder it was compiled in
        return -min(child.returncode, 0), words


def _failed(died: _Died) -> ConductorError:
    if died.number in _CRASHES:
        return Internal(
            "estimate_failed",
            f"llama.cpp crashed while planning the pool ({_name(died.number)}): {died.words}",
        )
    return Unavailable(
        "estimate_failed",
        f"the dry run did not finish ({_name(died.number)}); try again",
        retryable=True,
    )


def _name(number: int) -> str:
    return signal.Signals(number).name if number else "exited"


def _send(child: subprocess.Popen[bytes], body: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(struct.pack("<I", len(body)) + body)


def _receive(child: subprocess.Popen[bytes]) -> bytes:
    deadline = time.monotonic() + DEADLINE_S
    (length,) = struct.unpack("<I", _read(child, 4, deadline))
    return _read(child, length, deadline)


def _read(child: subprocess.Popen[bytes], length: int, deadline: float) -> bytes:
    assert child.stdout is not None
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while len(data) < length:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise TimeoutError
            part = os.read(child.stdout.fileno(), length - len(data))
            if not part:
                raise EOFError
            data += part
    return data
