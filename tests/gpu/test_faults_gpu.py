"""CUDA calls that fail, on a real GPU: refusals have reasons, and no conversation is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fault_shim import Fault
from scene import Scene, refusal, some_tokens, until

from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.status import DeviceStatus

MIB = 1 << 20
N_CTX, N_VOCAB = 2048, 49_152
LAUNCH_FAILED = 719
TRIES = 5
FIRST, SECOND = some_tokens(150, 1, N_VOCAB), some_tokens(40, 2, N_VOCAB)

StartScene = Callable[..., Scene]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("sleep", "call"), [("auto", "cuMemCreate"), ("off", "cudaMalloc")])
def test_memory_that_is_refused_at_load_or_at_the_pool_is_a_refusal_with_a_reason(
    cuda: str,
    cuda_scene: StartScene,
    random_model: Callable[[str], Path],
    fault: Fault,
    sleep: str,
    call: str,
    nth: int,
) -> None:
    """The first is that of the weights, the second that of the KV."""
    scene = cuda_scene(sleep=sleep)
    scene.conductor.register("stays", str(random_model("0.36B")), n_ctx=N_CTX)
    scene.run("stays", FIRST, max_tokens=16)
    before, pid = scene.calm_books(), scene.worker_pid(cuda)
    fault.arm(call, nth)
    refusal(lambda: scene.conductor.register("comes", str(random_model("0.5B")), n_ctx=N_CTX))
    assert fault.fired() == 1
    fault.arm("", 0)
    scene.settled(before)
    assert scene.worker_pid(cuda) == pid, "nothing had to die for it"
    assert not scene.run("stays", SECOND, max_tokens=16).usage.reprefilled_tokens
    scene.conductor.register("comes", str(random_model("0.5B")), n_ctx=N_CTX)
    assert len(scene.run("comes", FIRST, max_tokens=16).ids) == 16


def test_a_first_decode_that_gets_no_memory_costs_a_worker_and_no_conversation(
    cuda: str, cuda_scene: StartScene, random_model: Callable[[str], Path], fault: Fault
) -> None:
    """llama.cpp aborts there. Its scratch memory comes from the driver after the buffers'."""
    scene = cuda_scene()
    scene.conductor.register("stays", str(random_model("0.36B")), n_ctx=N_CTX)
    expected = two_turns(scene, "stays", "reference")
    first = scene.run("stays", FIRST, max_tokens=16)
    path = str(random_model("0.5B"))
    for nth in range(3, 12):
        fault.arm("cuMemCreate", nth)
        error = attempt(lambda: scene.conductor.register("comes", path, n_ctx=N_CTX))
        if error is None:
            error = attempt(lambda: scene.run("comes", FIRST, max_tokens=4))
        fired = fault.fired()
        fault.arm("", 0)
        until(lambda: scene.device(cuda).worker, "there is a worker")
        settle(scene, "comes", path)
        assert len(scene.run("comes", FIRST, max_tokens=4).ids) == 4
        scene.conductor.unregister("comes")
        if not fired:
            assert error is None
            break
    second = scene.run("stays", SECOND, max_tokens=16)
    assert [first.ids, second.ids] == expected


@pytest.mark.parametrize(
    ("call", "code"),
    [("cuMemUnmap", LAUNCH_FAILED), ("cuMemCreate", 2), ("cuMemMap", LAUNCH_FAILED)],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_sleep_or_a_wake_that_fails_loses_no_conversation(
    cuda: str,
    cuda_scene: StartScene,
    random_model: Callable[[str], Path],
    fault: Fault,
    call: str,
    code: int,
    nth: int,
) -> None:
    models = {"one": str(random_model("0.36B")), "two": str(random_model("0.5B"))}
    scene = cuda_scene()
    for agent, path in models.items():
        scene.conductor.register(agent, path, n_ctx=N_CTX)
    expected = {agent: two_turns(scene, agent, "reference") for agent in models}
    capacity = room_for_one(scene.device(cuda))
    scene.__exit__(None, None, None)

    scene = cuda_scene(capacity_bytes=capacity, mode="timeshare")
    for agent, path in models.items():
        scene.conductor.register(agent, path, n_ctx=N_CTX)
    firsts = {agent: scene.run(agent, FIRST, max_tokens=16).ids for agent in models}
    fault.arm(call, nth, code)
    for agent in models:
        found = persist(scene, agent, SECOND)
        assert [firsts[agent], found] == expected[agent]
    assert fault.fired() == 1, "it was made use of"


def two_turns(scene: Scene, agent: str, conversation: str) -> list[list[int]]:
    return [
        scene.run(agent, ids, max_tokens=16, conversation=conversation).ids
        for ids in (FIRST, SECOND)
    ]


def persist(scene: Scene, agent: str, tokens: list[int]) -> list[int]:
    """Send it until it is answered, as a client does that is told to try again."""
    for _ in range(TRIES):
        try:
            return scene.run(agent, tokens, max_tokens=16).ids
        except ConductorError as error:
            if not error.retryable:
                raise
    raise AssertionError(f"{agent} was refused {TRIES} times")


def attempt(call: Callable[[], object]) -> ConductorError | None:
    try:
        call()
    except ConductorError as error:
        return error
    return None


def settle(scene: Scene, agent: str, path: str) -> None:
    """Registered, whatever became of the try before."""
    names = [item.agent for item in scene.conductor.list()]
    if agent in names:
        until(lambda: scene.agent(agent).state == "ready", f"{agent} is back")
    else:
        scene.conductor.register(agent, path, n_ctx=N_CTX)


def room_for_one(device: DeviceStatus) -> int:
    """Bytes for the larger of the models with its pool."""
    sizes: dict[str, int] = {}
    fixed = 0
    for line in device.promised.lines:
        kind, _, model = line.key.partition(":")
        if kind in ("weights", "pool"):
            name = model.partition("@")[0]
            sizes[name] = sizes.get(name, 0) + line.bytes
        else:
            fixed += line.bytes
    assert device.memory is not None
    return fixed + max(sizes.values()) + device.memory.foreign_bytes + 96 * MIB
