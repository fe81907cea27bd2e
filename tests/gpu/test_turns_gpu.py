"""The headline, on a real GPU: models that do not fit together take turns, and nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from scene import Scene, some_tokens, until

from vram_conductor.protocol.status import DeviceStatus
from vram_conductor.protocol.values import Line

MIB = 1 << 20
N_CTX = 4096
TURNS = 3
SLACK_BYTES = 96 * MIB
MODELS = {"small": "0.36B", "middle": "0.5B", "large": "1.2B"}

Ids = dict[str, list[list[int]]]
StartScene = Callable[..., Scene]


def talk(scene: Scene, paths: dict[str, Path]) -> Ids:
    """Every agent in turn, several times: 200 tokens in, 24 out, then 40 in, 24 out."""
    for agent, path in paths.items():
        scene.conductor.register(agent, str(path), n_ctx=N_CTX)
    found: Ids = {agent: [] for agent in paths}
    for turn in range(TURNS):
        for seed, agent in enumerate(paths):
            prompt = some_tokens(40 if turn else 200, 10 * turn + seed, 49_152)
            result = scene.run(agent, prompt, max_tokens=24)
            assert not result.usage.reprefilled_tokens, result.usage
            found[agent].append(result.ids)
    return found


def room_for_one(device: DeviceStatus) -> int:
    """What a device needs for the largest of the models and its pool, from what all promise."""
    lines = device.promised.lines
    fixed = sum(line.bytes for line in lines if line.key.startswith(("base", "scratch:")))
    weights = _by_model(lines, "weights:")
    pools = _by_model(lines, "pool:")
    assert weights.keys() == pools.keys()
    largest = max(weights[model] + pools[model] for model in weights)
    assert largest + SLACK_BYTES < sum(weights.values()) + sum(pools.values())
    assert device.memory is not None
    return fixed + largest + device.memory.foreign_bytes + SLACK_BYTES


def _by_model(lines: list[Line], prefix: str) -> dict[str, int]:
    return {
        line.key.removeprefix(prefix).partition("@")[0]: line.bytes
        for line in lines
        if line.key.startswith(prefix)
    }


@contextmanager
def peak(used_bytes: Callable[[], int]) -> Generator[list[int]]:
    """Samples NVML until the block is left."""
    samples, stop = [used_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            samples.append(used_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


@pytest.fixture(scope="module")
def paths(random_model: Callable[[str], Path]) -> dict[str, Path]:
    return {agent: random_model(size) for agent, size in MODELS.items()}


@pytest.fixture
def reference(
    cuda: str, cuda_scene: StartScene, paths: dict[str, Path], used_bytes: Callable[[], int]
) -> tuple[Ids, int]:
    """The same conversations with room for all, and the capacity that has room for one. Its worker
    is gone by then, and so is all that it took of the card."""
    before = used_bytes()
    scene = cuda_scene()
    ids = talk(scene, paths)
    device = scene.device(cuda)
    assert not device.rates.get("sleep_weights")
    scene.__exit__(None, None, None)
    until(lambda: used_bytes() - before < 4 * MIB, "the card is as it was")
    return ids, room_for_one(device)


@pytest.mark.parametrize("sleep", ["auto", "off"])
def test_three_models_take_turns_on_room_for_one(
    sleep: str,
    cuda: str,
    cuda_scene: StartScene,
    paths: dict[str, Path],
    reference: tuple[Ids, int],
    used_bytes: Callable[[], int],
) -> None:
    expected, capacity = reference
    before = used_bytes()
    scene = cuda_scene(capacity_bytes=capacity, mode="timeshare", sleep=sleep)
    with peak(used_bytes) as samples:
        assert talk(scene, paths) == expected
    device = scene.device(cuda)
    assert device.worker is not None
    mechanism, rates = device.worker.mechanism, device.rates
    assert device.promised.cap_bytes <= capacity
    if sleep == "off":
        assert mechanism == "state-swap"
        assert rates["load"].count > len(paths), "weights were loaded again"
    else:
        assert mechanism == "vmm-sleep", device.worker.mechanism_note
        assert rates["wake_weights"].count > 0
        assert rates["sleep_weights"].count > 0
    assert max(samples) - before <= capacity, f"peak {max(samples) - before}, cap {capacity}"


def test_what_is_said_to_be_resident_is_what_nvml_sees(
    cuda: str, cuda_scene: StartScene, paths: dict[str, Path]
) -> None:
    scene = cuda_scene()
    talk(scene, paths)

    def calm() -> DeviceStatus | None:
        device = scene.device(cuda)
        promised = {line.key for line in device.promised.lines if line.bytes}
        resident = {line.key for line in device.resident if line.bytes}
        return device if promised <= resident else None

    device = until(calm, "all that is promised is resident")
    assert device is not None
    assert device.memory is not None
    unexplained = abs(device.unattributed_bytes)
    assert unexplained <= max(device.resident_bytes // 50, 16 * MIB), device
