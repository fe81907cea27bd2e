"""What other programs take is not handed out: it is denied while they have it, admitted after."""

from __future__ import annotations

import subprocess
import sys

from gguf_models import Spec
from scene import MIB, Scene, model, refusal, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.worker.memory import host_memory

CAPACITY = 256 * MIB
SPARE = 1024 * MIB
"""What others may take before it touches the device: more than this machine's own ups and downs."""

GROWTH = SPARE + CAPACITY + 768 * MIB
HOG = """
import sys
blocks = []
for line in sys.stdin:
    blocks.append(b"x" * int(line))
"""
OTHER = Spec(vocab="bytes", seed=80)
TURNS = [some_tokens(30, seed) for seed in range(3)]


def grow(scene: Scene, hog: subprocess.Popen[str]) -> None:
    """Until the foreign program has taken all of the device."""
    assert hog.stdin is not None
    hog.stdin.write(f"{GROWTH}\n")
    hog.stdin.flush()
    until(lambda: scene.device().budget_bytes < MIB, "the broker hears of it")


def test_a_foreign_program_comes_and_goes() -> None:
    host = host_memory()
    host_cap = host.total_bytes - host.used_bytes - CAPACITY - SPARE
    assert host_cap > GROWTH, "this test needs 4 GiB of free memory"
    device = StageDevice(capacity_bytes=CAPACITY, host_cap_bytes=host_cap)
    with Scene(device, worker="sample_ms = 100") as scene:
        scene.conductor.register("stays", model(), n_ctx=512)
        expected = [scene.run("stays", ids, conversation="alone", max_tokens=6) for ids in TURNS]
        found = [scene.run("stays", TURNS[0], max_tokens=6)]
        assert scene.device().budget_bytes == CAPACITY
        with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE, text=True) as hog:
            try:
                grow(scene, hog)
                error = refusal(lambda: scene.conductor.register("new", model(OTHER), n_ctx=512))
                assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
                assert (error.reason, error.details["code"]) == (LEDGER_DENY, "CAP")
                assert error.details["foreign_bytes"] > CAPACITY - 2 * MIB
                assert "foreign=" in error.message
                assert [agent.agent for agent in scene.conductor.list()] == ["stays"]
            finally:
                hog.kill()
        until(lambda: scene.device().budget_bytes == CAPACITY, "the device is whole again")
        assert scene.conductor.register("new", model(OTHER), n_ctx=512).info is not None
        assert scene.run("new", TURNS[0], max_tokens=3).ids
        # Whoever was here before has lost nothing.
        found += [scene.run("stays", ids, max_tokens=6) for ids in TURNS[1:]]
        assert [result.ids for result in found] == [result.ids for result in expected]
        assert not any(result.usage.reprefilled_tokens for result in found)
