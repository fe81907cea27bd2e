"""Memory of a real GPU that programs outside take: without asking, by a lease, and in the moment
between a sleep and a wake (cases A2 and F7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hogs import CUPY, Hog, base, job_of, wait_for_others, while_agents_run
from scene import MIB, WAIT_S, Scene, some_tokens, until
from taking_turns import alone, beside_one_that_never_ends

N_CTX = 4096
VOCAB = 40_000
TURNS = [some_tokens(60, seed, VOCAB) for seed in range(3)]
ENDLESS = 3900
AGENTS = {"runs": "0.36B", "rests": "0.5B"}
NEWCOMER = "1.2B"
ROOM = 4 << 30
"""For all three and the process itself; others may have the rest of the card."""


@pytest.fixture
def hog(cuda: str) -> Iterator[Hog]:
    """With a CUDA context, so that its size is known before the system starts."""
    pytest.importorskip("cupy", reason="the foreign program is one with cupy")
    with Hog(CUPY, cuda.partition(":")[2] or "0") as hog:
        yield hog


def start(
    cuda_scene: Callable[..., Scene], random_model: Callable[[str], Path], **options: object
) -> Scene:
    """Two agents on the whole card, both resident."""
    random_model(NEWCOMER)
    scene = cuda_scene(**options)
    for agent, size in AGENTS.items():
        scene.conductor.register(agent, str(random_model(size)), n_ctx=N_CTX)
        scene.run(agent, TURNS[0], conversation="first", max_tokens=2)
    return scene


def needs(scene: Scene) -> int:
    """What the smallest of the agents takes alone, base and scratch apart."""
    agents = [scene.agent(agent) for agent in AGENTS]
    return min(agent.weights_bytes + agent.pool_bytes for agent in agents)


def all_but(scene: Scene, cuda: str, left_bytes: int) -> int:
    """What must be taken so that so much is left of the budget."""
    return scene.device(cuda).budget_bytes - left_bytes


def test_a_foreign_program_takes_the_card_from_agents_that_run(
    cuda: str,
    hog: Hog,
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
) -> None:
    """Agents were given a part of the card, and another program takes more than the rest: it finds
    the memory at once, since nobody has it, and what it takes is missing in their part."""
    capacity = used_bytes() + ROOM
    scene = start(cuda_scene, random_model, worker="sample_ms = 200", capacity_bytes=capacity)
    device = scene.device(cuda)
    assert ROOM // 2 < device.budget_bytes < ROOM + 64 * MIB
    take = all_but(scene, cuda, base(scene, cuda) + needs(scene) // 2)
    assert take > device.budget_bytes - device.resident_bytes, "somebody must go"
    newcomer = str(random_model(NEWCOMER))
    while_agents_run(scene, cuda, hog, take, TURNS, "runs", "rests", newcomer, ENDLESS)


def test_a_lease_is_room_that_a_program_can_really_allocate(
    cuda: str,
    hog: Hog,
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
    used_bytes: Callable[[], int],
) -> None:
    scene = start(cuda_scene, random_model)
    before = scene.run("runs", TURNS[0], max_tokens=6)
    left = base(scene, cuda) + needs(scene) // 2
    size = all_but(scene, cuda, left)
    used_before = used_bytes()
    with scene.conductor.lease("train", size, ttl_s=120, device=cuda) as lease:
        assert lease.info.state == "held"
        device = scene.device(cuda)
        assert device.memory is not None
        assert device.memory.own_bytes <= device.budget_bytes
        assert used_bytes() < used_before
        # At once, and all of it.
        hog.take(size)
        reply = scene.start("runs", TURNS[1], max_tokens=6)
        job = until(lambda: job_of(scene, "runs"), "it waits")
        assert job is not None
        assert job.waiting == "lease:local/train"
        hog.leave()
    after = reply.result(WAIT_S)
    assert not after.usage.reprefilled_tokens
    expected = [scene.run("runs", ids, conversation="alone", max_tokens=6).ids for ids in TURNS[:2]]
    assert [before.ids, after.ids] == expected


def test_memory_taken_between_a_sleep_and_a_wake_costs_nothing_but_time(
    cuda: str,
    hog: Hog,
    cuda_scene: Callable[..., Scene],
    random_model: Callable[[str], Path],
) -> None:
    """The models sleep for a lease. Its holder takes the memory and gives the lease back, not the
    memory, and no sample has seen it yet: the wake finds no room, and waits."""
    scene = start(cuda_scene, random_model, worker="sample_ms = 4000")
    worker = scene.worker_pid(cuda)
    expected = alone(scene, "runs", TURNS)[:2]
    found = [scene.run("runs", TURNS[0], max_tokens=8)]
    size = all_but(scene, cuda, base(scene, cuda) + needs(scene) // 2)
    scene.conductor.lease("train", size, ttl_s=120, device=cuda)
    hog.take(size)
    scene.conductor.release_lease("train")
    reply = scene.start("runs", TURNS[1], max_tokens=8)
    wait_for_others(scene, "runs")
    assert scene.worker_pid(cuda) == worker
    hog.leave()
    found.append(reply.result(WAIT_S))
    assert [result.ids for result in found] == expected
    assert not any(result.usage.reprefilled_tokens for result in found)
    assert scene.worker_pid(cuda) == worker
    assert scene.device(cuda).promised.promised_bytes > 0


def test_three_models_on_room_for_one_do_not_wait_for_one_that_never_ends(
    cuda: str, cuda_scene: Callable[..., Scene], random_model: Callable[[str], Path]
) -> None:
    sizes = {**AGENTS, "large": NEWCOMER}
    roomy = cuda_scene()
    said = {}
    for agent, size in sizes.items():
        roomy.conductor.register(agent, str(random_model(size)), n_ctx=N_CTX)
        said[agent] = alone(roomy, agent, TURNS[:1])[-1]
    # The other scene's worker holds its memory: here it is foreign, and constant.
    roomy_own = roomy.device(cuda).memory
    assert roomy_own is not None
    status = roomy.device(cuda)
    fixed = base(roomy, cuda)
    largest = max(info.weights_bytes + info.pool_bytes for info in map(roomy.agent, sizes))
    foreign = status.foreign_bytes + roomy_own.own_bytes
    scene = cuda_scene(capacity_bytes=fixed + largest + foreign + 96 * MIB, mode="timeshare")
    for agent, size in sizes.items():
        scene.conductor.register(agent, str(random_model(size)), n_ctx=N_CTX)
    assert beside_one_that_never_ends(scene, list(sizes), TURNS[0], ENDLESS) == said
