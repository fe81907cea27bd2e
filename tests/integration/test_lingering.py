"""Agents and weights that go by themselves, in the whole product."""

from __future__ import annotations

import time

from gguf_models import Spec
from scene import BYSTANDER, Scene, model, some_tokens, until

from vram_conductor.client import Conductor

SPEC = Spec(vocab="bytes", seed=91, n_ctx_train=16_384)
WORDS = some_tokens(20, 9)
LINGER_S = 1


def resident(scene: Scene) -> set[str]:
    """Keys of what is on the device."""
    return {line.key for line in scene.device().resident}


def shows(scene: Scene, key: str, there: bool) -> None:
    """Wait until the worker has said whether it is on the device."""
    until(lambda: (key in resident(scene)) == there, f"{key} is {'' if there else 'not '}there")


def test_weights_leave_when_nobody_uses_them_and_come_back_with_the_next_job(scene: Scene) -> None:
    alone = scene.conductor.register("alone", model(SPEC), n_ctx=512)
    expected = [scene.run("alone", WORDS, max_tokens=8).ids for _ in range(2)]
    scene.conductor.unregister("alone")
    before = scene.device().lingered
    info = scene.conductor.register("brief", model(SPEC), n_ctx=512, linger_s=LINGER_S).info
    assert info is not None
    assert info.linger_s == LINGER_S
    assert alone.info is not None
    assert alone.info.model_id == info.model_id
    found = [scene.run("brief", WORDS, max_tokens=8)]
    until(lambda: scene.device().lingered == before + 1, "its weights have left")
    assert f"weights:{info.model_id}" not in resident(scene)
    assert scene.agent("brief").state == "ready"
    promised = {line.key: line.bytes for line in scene.device().promised.lines}
    assert promised[f"weights:{info.model_id}"] > 0, "what was promised stays promised"
    found.append(scene.run("brief", WORDS, max_tokens=8))
    assert [result.ids for result in found] == expected
    assert found[1].usage.reprefilled_tokens == 0


def test_weights_stay_for_a_while_without_an_agent(scene: Scene) -> None:
    loads: list[int] = []
    for linger_s in (60, LINGER_S):
        before = scene.device().lingered
        info = scene.conductor.register("brief", model(SPEC), n_ctx=512, linger_s=linger_s).info
        assert info is not None
        weights, pool = f"weights:{info.model_id}", f"pool:{info.model_id}@f16"
        shows(scene, pool, True)
        loads.append(scene.device().rates["load"].count)
        scene.conductor.unregister("brief")
        shows(scene, pool, False)
        if linger_s == 60:
            assert weights in resident(scene)
            assert weights not in {line.key for line in scene.device().promised.lines}
    assert loads[0] == loads[1], "it was not loaded again"
    until(lambda: scene.device().lingered == before + 1, "its weights have left")
    assert weights not in resident(scene)


def test_status_says_which_agents_went_and_why(scene: Scene) -> None:
    before = scene.conductor.status().sweep
    scene.conductor.register("idle", model(SPEC), n_ctx=256, ttl_s=1)
    with Conductor(scene.stage.endpoint, client="other") as other:
        other.register("temp", model(SPEC), n_ctx=256, ephemeral=True)
    until(lambda: {a.agent for a in scene.conductor.list()} == {BYSTANDER}, "both are gone")
    sweep = scene.conductor.status().sweep
    assert (sweep.idle, sweep.session_ended) == (before.idle + 1, before.session_ended + 1)
    last = {(swept.agent, swept.reason) for swept in sweep.last[:2]}
    assert last == {("idle", "idle"), ("temp", "session_ended")}


def test_an_ephemeral_agent_outlives_the_broker_if_its_client_does(scene: Scene) -> None:
    agent = scene.conductor.register("temp", model(SPEC), n_ctx=512, ephemeral=True)
    first = scene.run("temp", WORDS, max_tokens=8)
    epoch = scene.conductor.status().broker_epoch
    scene.kill_broker()
    until(lambda: scene.conductor.status().broker_epoch > epoch, "a new broker serves")
    until(lambda: scene.agent("temp").state == "ready", "it is back")
    assert scene.run("temp", WORDS, max_tokens=8).usage.state_version == 2
    assert first.usage.state_version == 1
    began = time.monotonic()
    agent.unregister()
    assert time.monotonic() - began < 60
