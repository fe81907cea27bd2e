"""A private conductor that a bench measures through: client, broker and worker for real."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from vram_conductor.client.bench_setting import Setting
from vram_conductor.client.reply import Reply
from vram_conductor.client.stage import Stage, StageDevice
from vram_conductor.client.sync import Conductor
from vram_conductor.protocol.status import AgentStatus, DeviceStatus
from vram_conductor.protocol.values import LedgerMode, MoveRate, Usage

TURN_S = 90.0
"""No job of a bench takes longer, unless something hangs."""
SETTLE_S = 2.0
HOST_CAP_BYTES = {"cuda": 8 << 30, "cpu": 1 << 30}
POLL_S = 0.005
LOG_LINES = 40
"""Of broker and worker, shown when something fails."""
CRASH_LINES = 150
"""Of a crash: some lines for each thread."""
_CRASHES = ("Fatal Python error:", "CUDA error")
_LAST_WORDS = ("GGML_ASSERT", ": CUDA error", "terminate called")
_GOES_ON = ("  ", "Thread 0x", "Current thread 0x", "Extension modules")
_IDS = range(1000, 2000)
"""Token ids that are text in every usual vocabulary."""


def token_ids(count: int, seed: int) -> list[int]:
    """A prompt of ``count`` tokens, always the same for a seed."""
    draw = random.Random(seed)
    return [draw.choice(_IDS) for _ in range(count)]


@dataclass(frozen=True)
class Turn:
    """One short job, as the client saw it.

    Attributes:
        ttft_ms: from the call to the first piece of text.
        usage: the receipt.
    """

    ttft_ms: float
    usage: Usage


def tracebacks(log: Sequence[str]) -> list[str]:
    """The lines of all tracebacks of a log, each with the line before it. *Pure.*"""
    found: list[str] = []
    inside, before = False, ""
    for line in log:
        starts = line.startswith("Traceback ")
        if starts and not inside:
            found.append(before)
        # The lines of a traceback are indented, but for its first and its last one.
        if starts or inside:
            found.append(line)
        inside, before = starts or (inside and line.startswith(" ")), line
    return found


def crashes(log: Sequence[str]) -> list[str]:
    """The lines of a log that tell how a library ended the process: what it said last, and where
    all threads were then. *Pure.*"""
    found: list[str] = []
    inside = False
    for line in log:
        starts = line.startswith(_CRASHES) or any(sign in line for sign in _LAST_WORDS)
        inside = starts or (inside and (not line or line.startswith(_GOES_ON)))
        if inside:
            found.append(line)
    return found


class Bed:
    """A stage that runs with one device, and a client.

    Attributes:
        device: the device's id.
        stage, conductor: the system and the client.
        said: what the supervisor has to say: who died, and how.
    """

    def __init__(
        self, device: str, stage: Stage, conductor: Conductor, said: Sequence[str] = ()
    ) -> None:
        self.device = device
        self.stage = stage
        self.conductor = conductor
        self.said = said

    # --- looking ------------------------------------------------------------------------------

    def status(self) -> DeviceStatus:
        """The device in STATUS."""
        return next(item for item in self.conductor.status().devices if item.device == self.device)

    def agent(self, name: str) -> AgentStatus:
        """An agent in LIST."""
        return next(item for item in self.conductor.list() if item.agent == name)

    def rates(self) -> dict[str, MoveRate]:
        """What moves took, once the worker has reported all that it did: reports are paced."""
        before, until = None, time.monotonic() + SETTLE_S
        while (now := self.status().rates) != before and time.monotonic() < until:
            before = now
            threading.Event().wait(0.12)
        return now

    def moved(self, kind: str, count: int, wait_s: float) -> MoveRate | None:
        """The rate of ``kind`` once more than ``count`` moves were reported; None: in time
        there was none."""
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            found = self.status().rates.get(kind)
            if found is not None and found.count > count:
                return found
            threading.Event().wait(POLL_S)
        return None

    def kv_bytes(self, agent: str) -> int:
        """Size of an agent's parked states, once there is one."""
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            held = sum(item.parked_bytes for item in self.agent(agent).conversations)
            if held:
                return held
            threading.Event().wait(POLL_S)
        return 0

    def pause(self, seconds: float) -> None:
        """Let time pass; what the worker does meanwhile is not measured."""
        threading.Event().wait(seconds)

    def complaints(self) -> list[str]:
        """Who died, and what broker and worker wrote about errors of their own, for a report's
        failures; also where nobody noticed anything else of them."""
        log = self.stage.log.read_text(errors="replace").splitlines()
        lines = [*tracebacks(log)[:LOG_LINES], *crashes(log)[:CRASH_LINES]]
        return [*self.said, *(["\n".join(["the log says:", *lines])] if lines else [])]

    # --- doing --------------------------------------------------------------------------------

    def start(self, agent: str, tokens: Sequence[int], **options: Any) -> Reply:
        """A greedy job that appends."""
        given: dict[str, Any] = {"continue_": True, "temperature": 0, "return_ids": True, **options}
        given.setdefault("timeout_ms", round(1000 * TURN_S))
        return self.conductor.decode(agent, tokens=list(tokens), **given)

    def turn(self, agent: str, tokens: Sequence[int], **options: Any) -> Turn:
        """A short job to its end."""
        began = time.perf_counter()
        reply = self.start(agent, tokens, **{"max_tokens": 4, **options})
        for _ in reply:
            break
        ttft_ms = 1000 * (time.perf_counter() - began)
        return Turn(ttft_ms, reply.result(TURN_S).usage)


@contextlib.contextmanager
def open_bed(
    setting: Setting,
    mode: LedgerMode,
    capacity_bytes: int,
    *,
    host_cap_bytes: int = 0,
    worker: str = "",
) -> Generator[Bed]:
    """Start everything; ``capacity_bytes`` 0 on cuda: the whole card.

    Raises:
        Unavailable: ``broker_failed``, ``no_worker``.
    """
    device = StageDevice(
        id=setting.device,
        kind=setting.kind,
        capacity_bytes=capacity_bytes,
        host_cap_bytes=host_cap_bytes or HOST_CAP_BYTES[setting.kind],
        mode=mode,
        threads=setting.threads,
        sleep=setting.sleep,
    )
    said: list[str] = []
    worker = f"model_dirs = {setting.folders!r}\n{worker}"
    stage = Stage([device], worker=worker, say=said.append)
    log: list[str] = []
    try:
        with stage, Conductor(stage.endpoint, client="bench") as conductor:
            try:
                yield Bed(setting.device, stage, conductor, said)
            finally:
                log = stage.log.read_text(errors="replace").splitlines()
    except Exception:
        for line in [*tracebacks(log[:-LOG_LINES])[:LOG_LINES], *log[-LOG_LINES:]]:
            sys.stderr.write(f"  | {line}\n")
        raise
