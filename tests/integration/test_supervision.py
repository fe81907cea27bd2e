"""A worker that hangs for good, and one that dies again and again: who must not go with it."""

from __future__ import annotations

import os
import signal

import psutil
import pytest
from scene import MIB, SMOL, Scene, model, some_tokens, until

from vram_conductor.client import supervisor
from vram_conductor.client.stage import StageDevice

SMALL = StageDevice(capacity_bytes=160 * MIB, host_cap_bytes=64 * MIB)
BRIEF = "drain_ms = 500"


def test_a_worker_that_does_not_react_to_sigterm_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "TERM_GRACE_S", 2.0)
    with Scene(SMALL, broker=BRIEF) as scene:
        scene.conductor.register("a", SMOL, n_ctx=256)
        assert scene.run("a", some_tokens(5, 1, 40_000), max_tokens=2).ids
        worker = psutil.Process(scene.worker_pid())
        assert worker.memory_info().rss > 90 * MIB
        # A stopped process gets SIGTERM when it goes on, which is never.
        os.kill(worker.pid, signal.SIGSTOP)
    assert not worker.is_running(), "and all that it held is free"
    assert any("ignores SIGTERM" in line for line in scene.news), scene.news


def test_a_worker_that_dies_again_and_again_does_not_take_the_broker_with_it() -> None:
    with Scene(SMALL, broker=BRIEF) as scene:
        scene.conductor.register("a", model(), n_ctx=256)
        expected = scene.run("a", some_tokens(9, 1), conversation="x", max_tokens=4).ids
        broker = scene.broker_pid()
        for _ in range(3):
            scene.kill_worker()
            until(lambda: scene.device().worker is None, "the broker knows")
            scene.worker_pid()
        again = scene.run("a", some_tokens(9, 1), conversation="y", max_tokens=4)
        assert again.ids == expected
        assert scene.broker_pid() == broker
        assert scene.agent("a").conversations[0].version == 1
