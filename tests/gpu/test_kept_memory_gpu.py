"""Unloaded, and still on the card: a driver that takes memory back and does not free it (F2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_shim import Fault
from hoards import ENDS, RESTS, unloaded_and_still_there, wear_sooner
from scene import MIB, Scene, some_tokens, until

SIZES = {RESTS: "0.36B", ENDS: "1.2B"}
N_CTX = dict.fromkeys(SIZES, 4096)
WORDS = [some_tokens(60, seed, 40_000) for seed in (1, 2, 3)]
LEAST = 600 * MIB
"""The weights of the larger one."""


def room(scene: Scene, device: str, models: dict[str, str]) -> int:
    """For all that the process takes with both models, and half of the larger one once more: by
    the ledger of a device that has room for everything."""
    for agent, path in models.items():
        scene.conductor.register(agent, path, n_ctx=N_CTX[agent])
    scene.calm_books()
    ends = scene.agent(ENDS)
    return (
        scene.device(device).promised.promised_bytes + (ends.weights_bytes + ends.pool_bytes) // 2
    )


def test_what_is_unloaded_and_still_in_use_costs_a_worker_and_no_conversation(
    cuda: str,
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wear_sooner(monkeypatch)
    models = {agent: str(random_model(size)) for agent, size in SIZES.items()}
    others = used_bytes()
    scene = cuda_scene()
    needed = room(scene, cuda, models)
    scene.__exit__(None, None, None)
    until(lambda: used_bytes() <= others + 16 * MIB, "the first worker's memory is free")
    scene = cuda_scene(capacity_bytes=others + needed, worker="sample_ms = 200")
    seen: list[int] = []

    def keep() -> None:
        seen.append(used_bytes())
        fault.keep()

    def give_back() -> None:
        """Only what was freed until now stays."""
        assert fault.fired() > 0, "nothing was freed through the shim"
        fault.arm("", 0)
        seen.append(used_bytes())

    unloaded_and_still_there(scene, cuda, models, N_CTX, WORDS, keep, give_back)
    full, unloaded = seen
    assert unloaded >= full - 32 * MIB, "NVML itself shows it"
    again = used_bytes()
    assert abs(again - full) <= 64 * MIB, "the same two agents take what they took before"
    scene.conductor.unregister(ENDS)
    until(lambda: used_bytes() <= full - LEAST, "the new process gives it back")
