"""Models that compute on threads of their own, through client and broker: the same answers, beside
each other and beside moves; a cancel is heard meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from gguf_models import Spec
from scene import MIB, NO_END, WAIT_S, Scene, model, some_tokens, until

from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.values import LedgerMode

SPECS = {
    "a": Spec(vocab="bytes", n_ctx_train=16_384),
    "b": Spec(vocab="bytes", n_ctx_train=16_384, seed=5),
    "c": Spec(vocab="bytes", n_ctx_train=16_384, arch="gemma3", n_layer=7, tied=False),
}
TURNS = 4
N_CTX = 1024


def talk(scene: Scene, agent: str) -> list[list[int]]:
    """A few turns; what was said."""
    said: list[list[int]] = []
    for turn in range(TURNS):
        words = some_tokens(30, 10 * turn + ord(agent))
        result = scene.run(agent, words, max_tokens=20, logit_bias=NO_END)
        assert result.usage.reprefilled_tokens == 0, result.usage
        said.append(result.ids)
    return said


def everybody(lanes: str, capacity_bytes: int, mode: LedgerMode) -> dict[str, list[list[int]]]:
    """What three agents say who all talk at once."""
    device = StageDevice(capacity_bytes=capacity_bytes, host_cap_bytes=64 * MIB, mode=mode)
    with Scene(device, worker=f'lanes = "{lanes}"') as scene:
        for agent, spec in SPECS.items():
            scene.conductor.register(agent, model(spec), n_ctx=N_CTX)
        with ThreadPoolExecutor(len(SPECS)) as pool:
            futures = {agent: pool.submit(talk, scene, agent) for agent in SPECS}
            return {agent: future.result(WAIT_S) for agent, future in futures.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """What they say when everything has room and nothing is beside anything."""
    return everybody("inline", 256 * MIB, "reserve")


def smallest() -> int:
    """Room for the largest of the models alone, and not for two."""
    with Scene(StageDevice(capacity_bytes=256 * MIB, host_cap_bytes=64 * MIB)) as scene:
        for agent, spec in SPECS.items():
            scene.conductor.register(agent, model(spec), n_ctx=N_CTX)
        sizes: dict[str, int] = {}
        for line in scene.device().promised.lines:
            kind, _, name = line.key.partition(":")
            if kind in ("weights", "pool"):
                digest = name.partition("@")[0]
                sizes[digest] = sizes.get(digest, 0) + line.bytes
    assert len(sizes) == len(SPECS)
    return max(sizes.values()) + 64 * 1024


@pytest.mark.parametrize("room", ["for all", "for one"])
def test_three_models_at_once_say_what_they_say_one_after_the_other(
    expected: dict[str, list[list[int]]], room: str
) -> None:
    if room == "for all":
        assert everybody("threads", 256 * MIB, "reserve") == expected
    else:
        assert everybody("threads", smallest(), "timeshare") == expected


def test_a_cancel_is_heard_while_others_stream() -> None:
    device = StageDevice(capacity_bytes=256 * MIB, host_cap_bytes=64 * MIB)
    with Scene(device, worker='lanes = "threads"') as scene:
        for agent, spec in SPECS.items():
            scene.conductor.register(agent, model(spec), n_ctx=8192)
        replies = {
            agent: scene.start(agent, some_tokens(20, 1), max_tokens=4000, logit_bias=NO_END)
            for agent in SPECS
        }
        for reply in replies.values():
            next(reply)
        replies["a"].cancel()
        assert replies["a"].result(WAIT_S).usage.stop_reason == "cancelled"
        jobs = until(lambda: scene.conductor.status().jobs, "the others go on")
        assert {job.agent for job in jobs} <= {"b", "c"}
        for agent in ("b", "c"):
            replies[agent].cancel()
            assert replies[agent].result(WAIT_S).usage.stop_reason == "cancelled"
