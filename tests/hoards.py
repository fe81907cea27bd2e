"""A device that keeps what it was given back, and what must go on nevertheless: on a stand-in for
a card in tests/integration, on a real one in tests/gpu (case F2)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hogs import denied, job_of
from scene import MIB, WAIT_S, Scene, until

FOLDER = Path(__file__).parent / "hoarding"
RECYCLE_MS = 500
RESTS, ENDS = "rests", "ends"
DRIFT = 64 * MIB
"""So much may become part of what the process itself takes, or come and go with others."""


def wear_sooner(monkeypatch: pytest.MonkeyPatch, **env: str) -> None:
    """For the workers of a test: see ``hoarding/sitecustomize.py``."""
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), *filter(None, [path])]))
    for name, value in {"RECYCLE_MS": str(RECYCLE_MS), **env}.items():
        monkeypatch.setenv(name, value)


def unloaded_and_still_there(
    scene: Scene,
    device: str,
    models: dict[str, str],
    n_ctx: dict[str, int],
    words: list[list[int]],
    keep: Callable[[], object],
    give_back: Callable[[], object],
) -> None:
    """``ends`` is unregistered on a device that keeps what it had, while ``rests`` talks. Nobody
    is promised those bytes; once nothing runs, the worker is replaced, and with it they are free;
    ``rests`` goes on where it was.

    Args:
        models, n_ctx: of ``rests`` and ``ends``; there is room for both, and not for ``ends``
            twice.
        words: three turns.
        keep, give_back: from now on the device keeps what is freed; it does no longer.
    """
    for agent, path in models.items():
        scene.conductor.register(agent, path, n_ctx=n_ctx[agent])
    expected = [scene.run(RESTS, ids, conversation="alone", max_tokens=6).ids for ids in words]
    found = [scene.run(RESTS, words[0], max_tokens=6)]
    said = scene.run(ENDS, words[0], max_tokens=6).ids
    scene.calm_books()
    full, sick = models_of(scene, device), scene.worker_pid(device)
    budget, foreign = scene.device(device).budget_bytes, scene.device(device).foreign_bytes
    ends = scene.agent(ENDS)
    lost = ends.weights_bytes + ends.pool_bytes
    assert lost > 128 * MIB, "less is not worth a restart"

    reply = scene.start(RESTS, words[0], conversation="long", max_tokens=n_ctx[RESTS] - 100)
    next(reply)
    keep()
    scene.conductor.unregister(ENDS)
    give_back()
    now, seen_s = scene.device(device), time.monotonic()
    assert now.foreign_bytes - foreign >= lost - DRIFT, "at once"
    assert now.budget_bytes <= budget - lost + DRIFT
    error = denied(scene, ENDS, models[ENDS], n_ctx=n_ctx[ENDS])
    assert error.details["foreign_bytes"] - foreign >= lost - DRIFT
    until(lambda: time.monotonic() > seen_s + 2 * RECYCLE_MS / 1000, "it has lasted")
    assert scene.worker_pid(device) == sick, "a job runs"
    assert job_of(scene, RESTS), "it was to run until here: let it say more"
    reply.cancel()
    reply.result(WAIT_S)

    def replaced() -> bool:
        worker = scene.device(device).worker
        return worker is not None and worker.pid != sick

    until(replaced, "there is a new worker")
    found += [scene.run(RESTS, ids, max_tokens=6) for ids in words[1:]]
    assert [result.ids for result in found] == expected
    assert not any(result.usage.reprefilled_tokens for result in found)
    assert [result.usage.reused_tokens > 0 for result in found] == [False, True, True]
    until(
        lambda: scene.device(device).budget_bytes >= budget - DRIFT,
        "the device is theirs again",
    )
    fresh = scene.worker_pid(device)
    scene.conductor.register(ENDS, models[ENDS], n_ctx=n_ctx[ENDS])
    assert scene.run(ENDS, words[0], max_tokens=6).ids == said
    until(lambda: models_of(scene, device) == full, "all is as it was")
    assert scene.worker_pid(device) == fresh, "once is enough"


def models_of(scene: Scene, device: str) -> dict[str, int]:
    """What weights and pools are promised and are there."""
    status = scene.device(device)
    return {
        f"{where} {line.key}": line.bytes
        for where, lines in (("promised", status.promised.lines), ("there", status.resident))
        for line in lines
        if line.bytes and line.key.startswith(("weights:", "pool:"))
    }
