"""Timeshare: three models whose weights together exceed the device all serve, in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from gguf_models import Spec, make_model
from scene import MIB, Scene, some_tokens
from taking_turns import alone, beside_one_that_never_ends, in_turn, watched

from vram_conductor.client.board import render
from vram_conductor.client.probing import estimates
from vram_conductor.client.stage import StageDevice

SPECS = {
    name: Spec(vocab="bytes", seed=seed, n_layer=12, n_embd=128, n_ff=512)
    for seed, name in ((95, "a"), (96, "b"), (97, "c"))
}
N_CTX = 4096
ENDLESS = 3500
"""Tokens of an answer that takes longer than a time slice (two seconds)."""
TURNS = [some_tokens(60, seed) for seed in range(3)]


@dataclass
class Setting:
    """``said``: what each agent says where there is room for all."""

    scene: Scene
    said: dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def setting() -> Iterator[Setting]:
    models = {name: make_model(spec) for name, spec in SPECS.items()}
    sizes = estimates(list(models.values()), N_CTX)
    weights = sum(size["weights_bytes"] for size in sizes)
    capacity = max(size["weights_bytes"] + size["pool_bytes"] for size in sizes) + MIB
    assert weights > capacity, "the models are to be too large together"
    said: dict[str, list[list[int]]] = {}
    with Scene(StageDevice(capacity_bytes=4 * weights, host_cap_bytes=64 * MIB)) as roomy:
        for name, path in models.items():
            roomy.conductor.register(name, str(path), n_ctx=N_CTX)
            said[name] = alone(roomy, name, TURNS)
            assert len(set(said[name][-1])) > 10, "a model that repeats itself proves nothing"
    device = StageDevice(capacity_bytes=capacity, host_cap_bytes=64 * MIB, mode="timeshare")
    with Scene(device) as scene:
        for name, path in models.items():
            scene.conductor.register(name, str(path), n_ctx=N_CTX)
        yield Setting(scene, said)


def test_each_turn_finds_another_model_there(setting: Setting) -> None:
    scene = setting.scene
    with watched(scene, "cpu") as watch:
        found = in_turn(scene, list(SPECS), TURNS)
    for name in SPECS:
        assert [result.ids for result in found[name]] == setting.said[name][:-1]
        usages = [result.usage for result in found[name]]
        assert all(usage.reprefilled_tokens == 0 for usage in usages)
        assert [usage.reused_tokens > 0 for usage in usages] == [False, True, True]
        # Somebody's weights had to leave each time, and the KV came back.
        for usage in usages[1:]:
            assert any(key.startswith("weights:") for key in usage.swap.evicted)
            assert usage.swap.restored
    assert watch.over == []
    assert len(watch.seen) > 3


def test_nobody_waits_for_one_that_never_ends(setting: Setting) -> None:
    scene, agents = setting.scene, list(SPECS)
    with watched(scene, "cpu") as watch:
        said = beside_one_that_never_ends(scene, agents, TURNS[0], ENDLESS)
    assert said == {name: setting.said[name][-1] for name in agents}
    assert watch.over == []


def test_status_says_how_it_counts(setting: Setting) -> None:
    scene = setting.scene
    report = scene.conductor.status()
    (device,) = report.devices
    assert device.mode == "timeshare"
    lines = {line.key: line.bytes for line in device.promised.lines}
    weights = [size for key, size in lines.items() if key.startswith("weights:")]
    assert len(weights) == 3
    assert device.promised.promised_bytes <= device.promised.cap_bytes < sum(weights)
    drawn = " ".join(render(report, 100).split())
    assert "cpu" in drawn
    assert "timeshare mode" in drawn
    assert "models take turns: the largest counts" in drawn
