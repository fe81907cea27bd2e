"""What other programs take is not handed out: it is denied while they have it, admitted after."""

from __future__ import annotations

from gguf_models import Spec
from hogs import Hog, denied, while_agents_run
from scene import MIB, Scene, model, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.worker.memory import host_memory

CAPACITY = 256 * MIB
SPARE = 1024 * MIB
"""What others may take before it touches the device: more than this machine's own ups and downs."""

GROWTH = SPARE + CAPACITY + 768 * MIB
OTHER, THIRD = Spec(vocab="bytes", seed=80), Spec(vocab="bytes", seed=81)
TURNS = [some_tokens(30, seed) for seed in range(3)]
N_CTX = 16_384
ENDLESS = 16_000


def exposed() -> Scene:
    """A device that others' use touches once they take more than SPARE."""
    host = host_memory()
    host_cap = host.total_bytes - host.used_bytes - CAPACITY - SPARE
    assert host_cap > GROWTH, "this test needs 4 GiB of free memory"
    device = StageDevice(capacity_bytes=CAPACITY, host_cap_bytes=host_cap)
    return Scene(device, worker="sample_ms = 100")


def test_a_foreign_program_comes_and_goes() -> None:
    with exposed() as scene:
        scene.conductor.register("stays", model(), n_ctx=512)
        expected = [scene.run("stays", ids, conversation="alone", max_tokens=6) for ids in TURNS]
        found = [scene.run("stays", TURNS[0], max_tokens=6)]
        assert scene.device().budget_bytes == CAPACITY
        with Hog() as hog:
            hog.take(GROWTH)
            until(lambda: scene.device().budget_bytes < MIB, "the broker hears of it")
            error = denied(scene, "new", model(OTHER), n_ctx=512)
            assert error.details["foreign_bytes"] > CAPACITY - 2 * MIB
            assert [agent.agent for agent in scene.conductor.list()] == ["stays"]
        until(lambda: scene.device().budget_bytes == CAPACITY, "the device is whole again")
        assert scene.conductor.register("new", model(OTHER), n_ctx=512).info is not None
        assert scene.run("new", TURNS[0], max_tokens=3).ids
        # Whoever was here before has lost nothing.
        found += [scene.run("stays", ids, max_tokens=6) for ids in TURNS[1:]]
        assert [result.ids for result in found] == [result.ids for result in expected]
        assert not any(result.usage.reprefilled_tokens for result in found)


def test_a_foreign_program_takes_the_device_from_agents_that_run() -> None:
    with exposed() as scene, Hog() as hog:
        scene.conductor.register("runs", model(), n_ctx=N_CTX)
        scene.conductor.register("rests", model(OTHER), n_ctx=512)
        while_agents_run(scene, "cpu", hog, GROWTH, TURNS, "runs", "rests", model(THIRD), ENDLESS)
