"""Room for one pool and many who want it: few swaps, nobody waits for ever, nobody is killed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_models import Spec, make_model
from scene import MIB, SMOL, WAIT_S, Scene, model, some_tokens, until

from vram_conductor.client.probing import estimates
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.status import JobStatus

SPECS = {name: Spec(vocab="bytes", n_layer=16, seed=40 + seed) for seed, name in enumerate("ABCD")}
WORDS = {name: some_tokens(30, seed) for seed, name in enumerate("ABCD")}
N_CTX = 4096
LONG = 3000
"""Tokens of an answer that takes longer than a time slice (two seconds), also on a machine that is
twice as fast as most."""
SLICE_S = 2.0
"""A time slice of the worker's (``schedule.SLICE_NS``)."""


@pytest.fixture(scope="module")
def tight() -> Iterator[Scene]:
    """Four agents with a model each; room for the pool of one."""
    sizes = estimates([make_model(spec) for spec in SPECS.values()], N_CTX)
    pools = [size["pool_bytes"] for size in sizes]
    weights = sum(size["weights_bytes"] for size in sizes)
    capacity = weights + max(pools) + min(pools) // 2
    device = StageDevice(capacity_bytes=capacity, host_cap_bytes=128 * MIB)
    with Scene(device, broker="worker_inflight = 16") as scene:
        for name, spec in SPECS.items():
            scene.conductor.register(name, model(spec), n_ctx=N_CTX)
        yield scene


def jobs(scene: Scene, agent: str) -> list[JobStatus]:
    return [job for job in scene.conductor.status().jobs if job.agent == agent]


def is_there(scene: Scene, agent: str, state: str = "running") -> None:
    """Wait until the only job of ``agent`` is there."""
    until(lambda: [job.state for job in jobs(scene, agent)] == [state], f"{agent} is {state}")


def begin(scene: Scene, agent: str, conversation: str) -> Reply:
    """A long answer, as soon as it has generated something."""
    reply = scene.start(agent, WORDS[agent], conversation=conversation, max_tokens=LONG)
    next(reply)
    return reply


def pools_moved(results: list[Result]) -> int:
    """How often a pool had to leave for one of these jobs."""
    keys = [key for result in results for key in result.usage.swap.evicted]
    return sum(key.startswith("pool:") for key in keys)


def test_a_queue_over_three_models_takes_three_swaps(tight: Scene) -> None:
    alone = {name: tight.run(name, WORDS[name], max_tokens=4).ids for name in "ABC"}
    blocker = begin(tight, "D", "blocker")
    queue = "ABAACABC"
    replies = [
        tight.start(name, WORDS[name], conversation=f"queue-{place}", max_tokens=4)
        for place, name in enumerate(queue)
    ]

    def waiting() -> str:
        return "".join(job.agent for job in tight.conductor.status().jobs if job.state == "sent")

    until(lambda: waiting() == queue, "all of them wait at the worker")
    blocker.cancel()
    results = [reply.result(WAIT_S) for reply in replies]
    assert [result.ids for result in results] == [alone[name] for name in queue]
    assert pools_moved(results) <= 3


def test_one_who_waits_is_served_although_others_never_stop(tight: Scene) -> None:
    def another(number: int) -> Reply:
        name = f"stream-{number % 8}"
        return tight.start("A", WORDS["A"], conversation=name, continue_=False, max_tokens=100)

    alone = tight.run("C", WORDS["C"], conversation="alone", max_tokens=6)
    crowd, served = deque(another(number) for number in range(4)), 4
    next(crowd[0])
    rare = tight.start("C", WORDS["C"], conversation="rare", max_tokens=6)
    is_there(tight, "C", "sent")
    while jobs(tight, "C"):
        crowd.popleft().result(WAIT_S)
        crowd.append(another(served))
        served += 1
        assert served < 2000, "it waits for ever"
    result = rare.result(WAIT_S)
    assert result.ids == alone.ids
    assert any(key.startswith("pool:") for key in result.usage.swap.evicted)
    # A time slice, and some room for a machine that is busy with other things.
    assert result.usage.queue_ms < 20_000
    for reply in crowd:
        assert len(reply.result(WAIT_S).text) > 0


def test_little_traffic_for_one_model_causes_few_swaps(tight: Scene) -> None:
    """A never stops; C asks again whenever it has its answer, which takes no time at all."""
    alone = tight.run("C", WORDS["C"], conversation="alone", continue_=False, max_tokens=2).ids
    crowd = begin(tight, "A", "crowd")
    began_s, moved, ended = time.monotonic(), 0, 0
    for _ in range(4):
        found = tight.run("C", WORDS["C"], conversation="rare", continue_=False, max_tokens=2)
        assert found.ids == alone
        moved += pools_moved([found])
        if not jobs(tight, "A"):
            assert crowd.result(WAIT_S).usage.stop_reason == "length"
            ended += 1
            crowd = begin(tight, "A", f"crowd-{ended}")
    took_s = time.monotonic() - began_s
    # Whoever has come stays for a time slice, unless there is nothing more to do.
    assert 1 <= moved <= took_s / SLICE_S + 1 + ended
    crowd.cancel()
    crowd.result(WAIT_S)


def test_a_request_for_another_model_kills_nobody(tight: Scene) -> None:
    alone = tight.run("A", WORDS["A"], conversation="alone", max_tokens=LONG)
    short = tight.run("B", WORDS["B"], conversation="alone", max_tokens=6)
    long = begin(tight, "A", "long")
    second = tight.run("B", WORDS["B"], conversation="second", max_tokens=6)
    assert jobs(tight, "A"), "the long answer is not over"
    first = long.result(WAIT_S)
    assert second.ids == short.ids
    assert first.ids == alone.ids
    assert (first.usage.generated_tokens, first.usage.stop_reason) == (LONG, "length")
    assert (first.usage.reprefilled_tokens, first.usage.swap.restored) == (0, True)


def test_cancelling_who_waits_for_a_model_releases_everything(tight: Scene) -> None:
    expected = tight.run("B", WORDS["B"], conversation="alone", continue_=False, max_tokens=6)
    blocker = begin(tight, "A", "blocker")
    before = tight.books()
    waits = tight.start("B", WORDS["B"], conversation="given-up", max_tokens=6)
    is_there(tight, "B", "sent")
    waits.cancel()
    usage = waits.result(WAIT_S).usage
    assert (usage.stop_reason, usage.generated_tokens) == ("cancelled", 0)
    assert jobs(tight, "A"), "the one that runs is left alone"
    until(lambda: not jobs(tight, "B"), "the queue has let it go")
    after = tight.books()
    assert (after.promised, after.host, after.agents) == (
        before.promised,
        before.host,
        before.agents,
    )
    talks = {talk.conversation: talk.version for talk in tight.agent("B").conversations}
    assert talks.get("given-up", 0) == 0
    again = tight.start("B", WORDS["B"], conversation="given-up", max_tokens=6)
    is_there(tight, "B", "sent")
    blocker.cancel()
    assert blocker.result(WAIT_S).usage.stop_reason == "cancelled"
    assert again.result(WAIT_S).ids == expected.ids


# --- one model, several agents ----------------------------------------------------------------


@pytest.fixture(scope="module")
def single(smollm2: Path) -> Iterator[Scene]:
    """Room for SmolLM2 once, with a pool of 1280 cells and not a second copy of anything."""
    size = estimates([smollm2], 1280)[0]
    capacity = size["weights_bytes"] + size["pool_bytes"] + size["pool_bytes"] // 2
    device = StageDevice(capacity_bytes=capacity, host_cap_bytes=256 * MIB)
    with Scene(device, broker="default_n_ctx = 1024") as scene:
        yield scene


def resident(scene: Scene) -> list[tuple[str, int]]:
    return [(line.key, line.bytes) for line in scene.device().resident]


@pytest.mark.real
@pytest.mark.parametrize("slots", [1, 2])
def test_another_context_length_on_one_model_reloads_nothing(single: Scene, slots: int) -> None:
    single.conductor.register("short", SMOL, n_ctx=256, slots=slots)
    single.conductor.register("unset", SMOL, slots=slots)
    contexts = {name: single.agent(name).n_ctx for name in ("short", "unset")}
    assert contexts == {"short": 256, "unset": 1024}
    for name in contexts:
        single.run(name, f"I am {name}.", max_tokens=2)
    loaded, worker = single.calm_books().resident, single.worker_pid()
    assert [key.partition(":")[0] for key, _ in loaded] == ["base", "weights", "pool"]
    for turn in range(6):
        for name in contexts:
            usage = single.run(name, f" Turn {turn}.", max_tokens=2).usage
            assert usage.reprefilled_tokens == 0
            # Conversations change places in a single slot; neither the pool nor the weights do.
            assert not [key for key in usage.swap.evicted if key.startswith(("pool:", "weights:"))]
            assert usage.swap.restored == (slots == 1)
            assert resident(single) == loaded
    assert single.worker_pid() == worker
    for name in contexts:
        single.conductor.unregister(name)


@pytest.mark.real
def test_two_agents_on_one_file_share_one_copy_and_both_stay(single: Scene) -> None:
    single.conductor.register("first", SMOL, n_ctx=512)
    single.run("first", "The first one.", max_tokens=2)
    there = single.calm_books().resident
    alone = {key: size for key, size in there if key.startswith("weights:")}
    single.conductor.register("second", SMOL, n_ctx=512)
    for turn in range(3):
        for name in ("first", "second"):
            assert single.run(name, f"Turn {turn}.", max_tokens=2).usage.reprefilled_tokens == 0
    agents = {name: single.agent(name) for name in ("first", "second")}
    assert {agent.state for agent in agents.values()} == {"ready"}
    assert [len(agent.shared_with) for agent in agents.values()] == [1, 1]
    promised = single.device().promised.lines
    assert {line.key: line.bytes for line in promised if line.key.startswith("weights:")} == alone
    assert {key: size for key, size in resident(single) if key.startswith("weights:")} == alone
    assert len(alone) == 1
    # Whoever leaves takes nothing away from the other.
    single.conductor.unregister("first")
    assert single.run("second", "Still here?", max_tokens=2).usage.reprefilled_tokens == 0
    assert {key: size for key, size in resident(single) if key.startswith("weights:")} == alone
    single.conductor.unregister("second")
