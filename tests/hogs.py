"""Programs that take memory without asking, and what must go on while they do: on a cpu in
tests/integration, on a GPU in tests/gpu."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from scene import WAIT_S, Scene, refusal, until

from vram_conductor.protocol.errors import LEDGER_DENY, Code, ErrorInfo
from vram_conductor.protocol.status import JobStatus

HOST = """
import sys
blocks = []
print("ready", flush=True)
for line in sys.stdin:
    try:
        blocks.append(b"x" * int(line))
    except MemoryError:
        print(f"no {int(line)} bytes", flush=True)
    else:
        print("took", flush=True)
"""

CUPY = """
import sys
import cupy
cupy.cuda.Device(int(sys.argv[1])).use()
blocks = [cupy.cuda.runtime.malloc(1 << 20)]
print("ready", flush=True)
for line in sys.stdin:
    try:
        blocks.append(cupy.cuda.runtime.malloc(int(line)))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        free, total = cupy.cuda.runtime.memGetInfo()
        print(f"no {int(line)} bytes, {free} of {total} are free: {error}", flush=True)
    else:
        print("took", flush=True)
"""


class Hog:
    """A foreign program; it is ``ready``, its CUDA context made, when this returns."""

    def __init__(self, code: str = HOST, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear("ready")

    def take(self, n_bytes: int) -> None:
        """It has taken so much more when this returns. Only what is free can be had: whoever has
        memory keeps it until he is asked. AssertionError says what the program said instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n_bytes}\n")
        self._process.stdin.flush()
        self._hear("took")

    def leave(self) -> None:
        """It is killed; all that it had is free. Idempotent."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def _hear(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said == word:
            return
        code = "runs on" if said else f"ended with {self._process.wait(WAIT_S)}"
        raise AssertionError(f"the foreign program has not said {word!r} but {said!r}; it {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def job_of(scene: Scene, agent: str) -> JobStatus | None:
    return next((job for job in scene.conductor.status().jobs if job.agent == agent), None)


def wait_for_others(scene: Scene, agent: str) -> JobStatus:
    """Until the agent's only job waits for what others use."""

    def waiting() -> JobStatus | None:
        job = job_of(scene, agent)
        assert job is not None, "it is over"
        return job if job.waiting == "foreign" else None

    found = until(waiting, f"{agent} waits for others")
    assert found is not None
    return found


def denied(scene: Scene, name: str, model: str, **options: int) -> ErrorInfo:
    """A refusal of REGISTER that is the foreign program's doing, and says so."""
    error = refusal(lambda: scene.conductor.register(name, model, **options))  # type: ignore[arg-type]
    assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    assert (error.reason, error.details["code"]) == (LEDGER_DENY, "CAP")
    assert error.details["foreign_bytes"] > 0
    assert "foreign=" in error.message
    return error


def while_agents_run(
    scene: Scene,
    device: str,
    hog: Hog,
    take_bytes: int,
    words: Sequence[list[int]],
    agent: str,
    other: str,
    newcomer: str,
    endless: int,
) -> None:
    """``agent`` is in the middle of an answer, ``other`` between two of its turns, when the
    device is taken from them. Nothing dies, nothing is lost, nobody is let in; and when the
    program has gone, all is as before.

    Args:
        take_bytes: what the program takes; too much for either agent to stay.
        newcomer: path of a model that nobody has.
        endless: tokens of an answer that lasts until it is cancelled.
    """
    worker = scene.worker_pid(device)
    expected = [scene.run(other, ids, conversation="alone", max_tokens=6).ids for ids in words]
    found = [scene.run(other, words[0], max_tokens=6)]
    before = scene.device(device).budget_bytes
    lost = min(take_bytes, before)
    reply = scene.start(agent, words[0], max_tokens=endless)
    next(reply)
    hog.take(take_bytes)
    cut = wait_for_others(scene, agent)
    second = scene.start(other, words[1], max_tokens=6)
    wait_for_others(scene, other)

    def small() -> bool:
        now = scene.device(device)
        least = max(now.budget_bytes, base(scene, device))
        return now.budget_bytes <= before - lost // 2 and now.resident_bytes <= least

    until(small, "pools and weights have gone")
    denied(scene, "new", newcomer, n_ctx=512)
    hog.leave()
    until(
        lambda: scene.device(device).budget_bytes >= before - lost // 8,
        "the device is theirs again",
    )
    found.append(second.result(WAIT_S))
    found.append(scene.run(other, words[2], max_tokens=6))
    assert [result.ids for result in found] == expected
    assert not any(result.usage.reprefilled_tokens for result in found)

    def goes_on() -> bool:
        job = job_of(scene, agent)
        return job is None or job.generated_tokens > cut.generated_tokens + 20

    until(goes_on, "the answer goes on where it was")
    reply.cancel()
    result = reply.result(WAIT_S)
    assert result.usage.reprefilled_tokens == 0
    again = scene.run(agent, words[0], conversation="again", max_tokens=len(result.ids))
    assert again.ids == result.ids
    assert scene.conductor.register("new", newcomer, n_ctx=512).info is not None
    assert len(scene.run("new", words[0], max_tokens=3).ids) == 3
    assert scene.worker_pid(device) == worker


def base(scene: Scene, device: str) -> int:
    """What the worker's process itself takes."""
    lines = scene.device(device).promised.lines
    fixed = ("base", "scratch:")
    return sum(line.bytes for line in lines if line.key.startswith(fixed))
