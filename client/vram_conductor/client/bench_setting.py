"""What every bench is told, and what it asks of the worker's side in processes of their own."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from vram_conductor.client.probing import INSTALL
from vram_conductor.protocol.config import SleepMode
from vram_conductor.protocol.errors import (
    ErrorInfo,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    error_from_info,
)
from vram_conductor.protocol.plain import is_map
from vram_conductor.protocol.values import DeviceKind

CHILD_S = 300.0
_LISTEN_S, _END_S = 5.0, 5.0
_NEWS = "news: "
RANDOM_CUDA = ("0.36B", "0.5B", "1.2B")
RANDOM_CPU = ("tiny-1", "tiny-2", "tiny-3")


@dataclass(frozen=True)
class BenchModel:
    """A GGUF to measure with; ``name`` is for tables."""

    name: str
    path: str
    bytes: int


@dataclass(frozen=True)
class Setting:
    """One bench's circumstances.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        models: smallest first.
        rounds: 0: as many as the bench finds right for this kind of device.
        threads: compute threads on cpu; 0: all.
        sleep: of the device: ``off`` shows what it is worth.
        until_s: when to be done, on ``time.monotonic``'s clock: later rounds are left out.
    """

    device: str
    models: tuple[BenchModel, ...]
    rounds: int = 0
    threads: int = 0
    until_s: float = math.inf
    sleep: SleepMode = "auto"
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> DeviceKind:
        return "cuda" if self.on_cuda else "cpu"

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def folders(self) -> list[str]:
        """Where the worker may load from."""
        return sorted({str(Path(model.path).parent) for model in self.models})

    def number(self, cuda: int, cpu: int) -> int:
        """``rounds``, or what is right for this kind of device."""
        return self.rounds or (cuda if self.on_cuda else cpu)

    @property
    def left_s(self) -> float:
        """Seconds until the bench should be done."""
        return max(0.0, self.until_s - time.monotonic())

    def need(self, models: int) -> None:
        """Raises InvalidArgument ``too_few_models``."""
        if len(self.models) < models:
            raise InvalidArgument(
                "too_few_models",
                f"this bench needs {models} models, {len(self.models)} were named: give more with "
                "--models, or sizes with --random",
                needed=models,
                given=len(self.models),
            )

    def plain(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "models": [{"name": model.name, "bytes": model.bytes} for model in self.models],
            "rounds": self.rounds,
            "sleep": self.sleep,
            **self.extra,
        }


def check_device(name: str) -> str:
    """``cpu`` or ``cuda:N``.

    Raises:
        InvalidArgument: ``no_such_device``.
    """
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidArgument(
            "no_such_device", f"{name!r} is no device; write cpu, cuda:0 …", device=name
        )
    return f"cuda:{index or 0}" if kind == "cuda" else name


def given_models(paths: Sequence[str]) -> tuple[BenchModel, ...]:
    """Files that a user named, smallest first.

    Raises:
        NotFound: ``no_such_model``.
        InvalidArgument: ``bad_value``: a name that no message can carry.
    """
    found: list[BenchModel] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise NotFound("no_such_model", f"{path} is no file", path=str(path))
        try:
            str(path.resolve()).encode()
        except UnicodeEncodeError:
            raise InvalidArgument(
                "bad_value", f"the name of {path} is not UTF-8; rename the file"
            ) from None
        found.append(BenchModel(path.stem, str(path.resolve()), path.stat().st_size))
    return tuple(sorted(found, key=lambda model: model.bytes))


def random_folder() -> Path:
    """Where random models are kept for the next time."""
    return Path(tempfile.gettempdir()) / f"vram-conductor-bench-{os.getuid()}"


def random_models(sizes: Sequence[str], folder: Path | None = None) -> tuple[BenchModel, ...]:
    """Random-weight models of these sizes, smallest first, made now or found from the last time.

    Raises:
        InvalidArgument: ``unknown_size``.
        FailedPrecondition: ``gguf_missing``, ``worker_missing``.
    """
    rows = ask_worker("models", "--folder", str(folder or random_folder()), *sizes)
    found = [BenchModel(row["size"], row["path"], row["bytes"]) for row in rows]
    return tuple(sorted(found, key=lambda model: model.bytes))


def worker_command(*arguments: str) -> list[str]:
    """Command line of the worker's part of the benches."""
    return [sys.executable, "-m", "vram_conductor.worker.bench", *arguments]


def ask_worker(
    *arguments: str,
    timeout_s: float = CHILD_S,
    env: Mapping[str, str] | None = None,
    news: Callable[[str], None] | None = None,
) -> Any:
    """Run ``vram_conductor.worker.bench``; its JSON value.

    Args:
        env: is added to ours.
        news: is told, in another thread, what it does meanwhile: its lines that begin with
            ``news:`` on stderr.

    Raises:
        ConductorError: what it failed with.
        FailedPrecondition: ``worker_missing``: it cannot be imported.
        Internal: ``bench_failed``: it said nothing that can be understood.
    """
    try:
        with _listening(news) as (stderr, said):
            code, answer = _run(worker_command(*arguments), stderr, timeout_s, env or {})
    except subprocess.TimeoutExpired:
        raise Internal(
            "bench_failed",
            f"bench {arguments[0]} gave no answer within {timeout_s:.0f} s: give it more time "
            "(--seconds), or less to do",
        ) from None
    try:
        value = msgspec.json.decode(answer)
        error = value.get("error") if is_map(value) else None
        info = None if error is None else msgspec.convert(error, ErrorInfo)
    except msgspec.DecodeError:
        raise _silent(arguments[0], code, said) from None
    if info is not None:
        raise error_from_info(info)
    return value


def _run(
    command: Sequence[str], stderr: int, timeout_s: float, env: Mapping[str, str]
) -> tuple[int, str]:
    """Exit code and stdout of a child, which has ended whatever happens.

    Raises:
        TimeoutExpired: of ``subprocess``.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    ) as process:
        try:
            answer, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            # Killed at once, it would leave the half of a model that it was writing.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            raise
        finally:
            process.kill()
        return process.returncode, answer


@contextlib.contextmanager
def _listening(news: Callable[[str], None] | None) -> Generator[tuple[int, list[str]]]:
    """Where a child may write its stderr, and the lines that were no news: complete after the
    block."""
    reading, writing = os.pipe()
    said: list[str] = []

    def listen() -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                if not line.startswith(_NEWS):
                    said.append(line)
                elif news is not None:
                    news(line.removeprefix(_NEWS).strip())

    thread = threading.Thread(target=listen, name="stderr of a bench", daemon=True)
    thread.start()
    try:
        yield writing, said
    finally:
        os.close(writing)
        # What the child started may still hold the other end.
        thread.join(_LISTEN_S)


def _ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
        # Nobody else does it to a process that nobody knows.
        why = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        return f"ended by {name}{why}"
    return f"ended by signal {-code}"


def _silent(verb: str, code: int, said: Sequence[str]) -> FailedPrecondition | Internal:
    lines = [line.strip() for line in said if line.strip()]
    last = lines[-1] if lines else f"{_ended(code)}, no output"
    if last.startswith(("ModuleNotFoundError", "ImportError")):
        return FailedPrecondition(
            "worker_missing", f"the worker's side of the benches cannot run ({last}); {INSTALL}"
        )
    return Internal("bench_failed", f"bench {verb} failed: {last}")
