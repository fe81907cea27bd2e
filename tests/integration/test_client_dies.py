"""kill -9 of a client program: its jobs stop within a step, and nobody else notices."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from scene import NO_END, SMOL, Scene, some_tokens, until

from vram_conductor.protocol import limits
from vram_conductor.protocol.status import JobStatus

pytestmark = pytest.mark.real

MAX_TOKENS = 3_000
AT_ONCE_S = limits.ORPHAN_MS / 1000 * 0.9
"""Less than the time for which a client that might come back is waited for: a step takes a while on
a busy machine."""

PROGRAM = """
import ast, sys
from vram_conductor.client import Conductor
job = ast.literal_eval(sys.stdin.readline())
conductor = Conductor(job.pop("endpoint"))
for piece in conductor.decode("mortal", **job):
    print("piece", flush=True)
"""


@contextmanager
def program(scene: Scene, **job: Any) -> Generator[subprocess.Popen[str]]:
    """A program that has sent its DECODE, or will in a moment."""
    job |= {"endpoint": scene.stage.endpoint, "temperature": 0, "max_tokens": MAX_TOKENS}
    job |= {"logit_bias": NO_END}
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    try:
        child.stdin.write(f"{job}\n")
        child.stdin.flush()
        yield child
    finally:
        child.kill()
        child.communicate()


def mortal_job(scene: Scene) -> JobStatus | None:
    """The program's job, once it runs."""
    jobs = [job for job in scene.conductor.status().jobs if job.agent == "mortal"]
    return jobs[0] if jobs and jobs[0].state == "running" else None


def idle(scene: Scene, job: int) -> bool:
    """Whether the job is over, and the worker has no attempt of it any more."""
    report = scene.conductor.status()
    worker = report.devices[0].worker
    assert worker is not None
    return all(item.job != job for item in report.jobs) and worker.in_flight == len(report.jobs)


def kept_tokens(scene: Scene) -> int:
    """Length of the mortal agent's transcript; 0: nothing was committed."""
    return sum(item.tokens for item in scene.agent("mortal").conversations)


def test_a_client_that_is_killed_while_it_listens(scene: Scene) -> None:
    scene.conductor.register("mortal", SMOL, n_ctx=4096)
    with scene.undisturbed(), program(scene, prompt="Once upon a time") as child:
        assert child.stdout is not None
        for _ in range(5):
            assert child.stdout.readline() == "piece\n"
        job = mortal_job(scene)
        assert job is not None
        child.send_signal(signal.SIGKILL)
        until(lambda: idle(scene, job.job), "the job is over", AT_ONCE_S)
    # What it had is in the record: a small part of what it would have been.
    assert 5 <= kept_tokens(scene) < MAX_TOKENS / 2
    assert scene.run("mortal", "Again.", max_tokens=2).usage.state_version == 2
    scene.conductor.unregister("mortal")


def test_a_client_that_is_killed_while_a_long_prompt_is_computed(scene: Scene) -> None:
    scene.conductor.register("mortal", SMOL, n_ctx=4096)
    tokens = some_tokens(4_000, 7, 49_000)
    with scene.undisturbed(), program(scene, tokens=tokens) as child:
        found = until(lambda: mortal_job(scene), "the job runs")
        assert found is not None
        child.send_signal(signal.SIGKILL)
        until(lambda: idle(scene, found.job), "the job is over", AT_ONCE_S)
    assert kept_tokens(scene) == 0
    # The device is free again: a short prompt need not wait for the rest of the long one.
    assert scene.run("mortal", "Again.", max_tokens=2).usage.state_version == 1
    scene.conductor.unregister("mortal")
