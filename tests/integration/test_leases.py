"""A program that asks for device memory gets it; agents wait for it, and lose nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gguf_models import Spec
from scene import MIB, WAIT_S, Scene, model, refusal, some_tokens, until

from vram_conductor.client import AsyncConductor, Conductor
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.status import DeviceStatus, JobStatus

CAPACITY = 64 * MIB
SPECS = {name: Spec(vocab="bytes", seed=seed) for seed, name in ((90, "a"), (91, "b"))}
WORDS = [some_tokens(40, seed) for seed in range(3)]
N_CTX = 4096
LONG = 2000


@pytest.fixture(scope="module")
def leased() -> Iterator[Scene]:
    """Two agents with a model each, and room for both."""
    device = StageDevice(capacity_bytes=CAPACITY, host_cap_bytes=64 * MIB)
    with Scene(device) as scene:
        for agent, spec in SPECS.items():
            scene.conductor.register(agent, model(spec), n_ctx=N_CTX)
        yield scene


@pytest.fixture
def scene(leased: Scene) -> Iterator[Scene]:
    """Nothing is leased before and after, and no conversation has begun."""
    yield leased
    for lease in leased.device().leases:
        leased.conductor.release_lease(lease.name)
    for agent in SPECS:
        for conversation in leased.agent(agent).conversations:
            leased.conductor.reset(agent, conversation.conversation)
    until(lambda: leased.device().budget_bytes == CAPACITY, "the worker has it all again")


def within(device: DeviceStatus) -> None:
    """What is there, and what was leased, and what others use fit into the device."""
    leases = sum(lease.bytes for lease in device.leases)
    assert device.resident_bytes + leases + device.foreign_bytes <= CAPACITY
    assert device.budget_bytes == CAPACITY - leases - device.foreign_bytes


def job_of(scene: Scene, agent: str) -> JobStatus | None:
    return next((job for job in scene.conductor.status().jobs if job.agent == agent), None)


def talk(scene: Scene, agent: str) -> list[list[int]]:
    """What an undisturbed agent answers to WORDS."""
    turns = [scene.run(agent, ids, conversation="undisturbed", max_tokens=6) for ids in WORDS]
    scene.conductor.reset(agent, "undisturbed")
    return [turn.ids for turn in turns]


def test_agents_make_room_wait_and_go_on_where_they_were(scene: Scene) -> None:
    expected = {agent: talk(scene, agent) for agent in SPECS}
    found = {agent: [scene.run(agent, WORDS[0], max_tokens=6)] for agent in SPECS}
    before = scene.device()
    with scene.conductor.lease("train", CAPACITY, ttl_s=60) as lease:
        during = scene.device()
        within(during)
        assert (during.budget_bytes, during.resident_bytes) == (0, 0)
        assert [held.name for held in during.leases] == ["train"]
        waiting = {agent: scene.start(agent, WORDS[1], max_tokens=6) for agent in SPECS}
        for agent in SPECS:
            job = until(lambda agent=agent: job_of(scene, agent), "it waits")  # type: ignore[misc]
            assert job is not None
            assert job.waiting == "lease:local/train"
            assert job.waiting_ms is not None
            assert 0 < job.waiting_ms <= 60_000
        error = refusal(lambda: scene.conductor.register("new", model(), n_ctx=256))
        assert (error.reason, error.details["leases_bytes"]) == (LEDGER_DENY, CAPACITY)
        assert {agent.agent for agent in scene.conductor.list()} == set(SPECS)
    assert lease.error is None
    for agent, reply in waiting.items():
        found[agent].append(reply.result(WAIT_S))
        found[agent].append(scene.run(agent, WORDS[2], max_tokens=6))
        assert [result.ids for result in found[agent]] == expected[agent]
        assert not any(result.usage.reprefilled_tokens for result in found[agent])
    assert scene.device().promised == before.promised


def test_who_runs_while_it_is_asked_for_is_parked_in_the_middle(scene: Scene) -> None:
    alone = scene.run("a", WORDS[0], conversation="alone", max_tokens=LONG).ids
    reply = scene.start("a", WORDS[0], max_tokens=LONG)
    next(reply)
    with scene.conductor.lease("train", CAPACITY, ttl_s=60):
        within(scene.device())
        assert scene.device().resident_bytes == 0
        job = job_of(scene, "a")
        assert job is not None
        assert job.waiting == "lease:local/train"
        assert job.generated_tokens < LONG
    result = reply.result(WAIT_S)
    assert result.ids == alone
    assert result.usage.reprefilled_tokens == 0


def test_who_fits_beside_it_goes_on(scene: Scene) -> None:
    alone = {agent: scene.run(agent, WORDS[0], max_tokens=6).ids for agent in SPECS}
    for agent in SPECS:
        scene.conductor.reset(agent)
    info = scene.agent("a")
    need = info.weights_bytes + info.pool_bytes
    # Room for one of the two at a time, and no more.
    with scene.conductor.lease("train", CAPACITY - need, ttl_s=60):
        for _ in range(2):
            for name in SPECS:
                result = scene.run(name, WORDS[0], max_tokens=6, continue_=False)
                assert result.ids == alone[name]
                within(scene.device())


def test_it_ends_by_itself(scene: Scene) -> None:
    scene.conductor.lease("train", CAPACITY, ttl_s=1)
    result = scene.run("a", WORDS[0], max_tokens=6)
    assert len(result.ids) == 6
    assert scene.device().leases == []


def test_an_ephemeral_one_ends_with_the_program_that_is_killed(scene: Scene) -> None:
    code = (
        "import sys; from vram_conductor.client import Conductor\n"
        f"c = Conductor({scene.stage.endpoint!r})\n"
        f"c.lease('train', {CAPACITY}, ttl_s=3600, ephemeral=True)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "held\n"
        assert scene.device().budget_bytes == 0
        os.kill(program.pid, signal.SIGKILL)
    assert len(scene.run("a", WORDS[0], max_tokens=6).ids) == 6
    assert scene.device().leases == []


def test_more_than_there_can_be_and_more_than_there_is(scene: Scene) -> None:
    for agent in SPECS:  # a lease before this one may have taken them off the device
        scene.run(agent, WORDS[0], max_tokens=1)
    before = scene.calm_books()
    error = refusal(lambda: scene.conductor.lease("train", CAPACITY + 1))
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, LEDGER_DENY)
    assert error.details["short_by_bytes"] == 1
    scene.conductor.lease("one", CAPACITY // 2, park=False)
    promised = scene.device().promised.promised_bytes
    error = refusal(lambda: scene.conductor.lease("two", CAPACITY - promised + 1, park=False))
    assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    error = refusal(lambda: scene.conductor.lease("one", 5))
    assert error.reason == "lease_exists"
    scene.conductor.release_lease("one")
    scene.settled(before)


def test_it_outlives_the_broker_and_the_agents_come_back_beside_it(scene: Scene) -> None:
    expected = talk(scene, "a")
    first = scene.run("a", WORDS[0], max_tokens=6)
    scene.conductor.lease("train", CAPACITY, ttl_s=120)
    scene.kill_broker()
    with Conductor(scene.stage.endpoint, connect_timeout_s=WAIT_S) as conductor:
        until(lambda: conductor.status().devices[0].worker, "the worker is back")
        (device,) = conductor.status().devices
        (lease,) = device.leases
        assert (lease.name, lease.bytes, lease.state) == ("train", CAPACITY, "held")
        assert lease.left_ms is not None
        assert lease.left_ms <= 120_000
        until(
            lambda: {agent.state for agent in conductor.list()} == {"ready"},
            "both agents are back",
        )
        within(conductor.status().devices[0])
    reply = scene.start("a", WORDS[1], max_tokens=6)
    job = until(lambda: job_of(scene, "a"), "it waits")
    assert job is not None
    assert job.waiting == "lease:local/train"
    scene.conductor.release_lease("train")
    second = reply.result(WAIT_S)
    assert [first.ids, second.ids] == expected[:2]
    assert second.usage.reprefilled_tokens == 0


def test_a_worker_that_dies_meanwhile_comes_back_beside_it(scene: Scene) -> None:
    expected = talk(scene, "b")
    first = scene.run("b", WORDS[0], max_tokens=6)
    scene.conductor.lease("train", CAPACITY, ttl_s=120)
    scene.kill_worker()
    error = refusal(lambda: scene.conductor.lease("more", 1))
    assert error.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED)
    scene.worker_pid()
    until(lambda: scene.agent("b").state == "ready", "the agent is back")
    within(scene.device())
    reply = scene.start("b", WORDS[1], max_tokens=6)
    assert until(lambda: job_of(scene, "b"), "it waits").waiting == "lease:local/train"  # type: ignore[union-attr]
    scene.conductor.release_lease("train")
    second = reply.result(WAIT_S)
    assert [first.ids, second.ids] == expected[:2]
    assert second.usage.reprefilled_tokens == 0


def test_asyncio_and_the_command_line(scene: Scene) -> None:
    async def main() -> None:
        async with (
            AsyncConductor(scene.stage.endpoint) as conductor,
            conductor.lease("train", CAPACITY, ttl_s=1) as lease,
        ):
            assert lease.info is not None
            (device,) = (await conductor.status()).devices
            within(device)
            first = lease.info
            while lease.info is first:
                await asyncio.sleep(0.01)
            assert lease.error is None

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    assert scene.device().leases == []
    command = [sys.executable, "-m", "vram_conductor.client.cli", "lease", "train"]
    where = ["--clients", scene.stage.endpoint]
    done = subprocess.run([*command, "16 MiB", "--ttl", "2m", *where], check=True, text=True)
    assert done.returncode == 0
    (held,) = scene.device().leases
    assert (held.bytes, held.ttl_s) == (16 * MIB, 120)
    subprocess.run([*command, "--release", *where], check=True)
    assert scene.device().leases == []
