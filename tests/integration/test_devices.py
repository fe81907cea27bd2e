"""Two devices, a ledger each; and one device whose models take turns, weights and all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from gguf_models import Spec, make_model
from scene import MIB, WAIT_S, Scene, model, refusal, some_tokens, until

from vram_conductor.client.probing import estimates
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import LEDGER_DENY, Code

N_CTX = 1024
HEAVY = [
    Spec(vocab="bytes", n_layer=8, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, seed=seed)
    for seed in (60, 61, 62)
]
WORDS = [some_tokens(40, seed) for seed in range(8)]
LONG = 900


@dataclass(frozen=True)
class Size:
    """Of one heavy model; they are all alike."""

    weights_bytes: int
    pool_bytes: int

    @property
    def both_bytes(self) -> int:
        return self.weights_bytes + self.pool_bytes


@pytest.fixture(scope="module")
def size() -> Size:
    found = [
        Size(answer["weights_bytes"], answer["pool_bytes"])
        for answer in estimates([make_model(spec) for spec in HEAVY], N_CTX)
    ]
    assert len(set(found)) == 1
    return found[0]


# --- two devices ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(size: Size) -> Iterator[Scene]:
    """``cpu:0`` has room for one heavy model and a half, ``cpu:1`` for two and a half."""
    half = size.both_bytes // 2
    devices = [
        StageDevice("cpu:0", size.both_bytes + half, 64 * MIB, threads=1),
        StageDevice("cpu:1", 2 * size.both_bytes + half, 64 * MIB, threads=1),
    ]
    with Scene(*devices) as scene:
        yield scene


@pytest.fixture
def empty(pair: Scene) -> Iterator[Scene]:
    """Both devices with nothing on them."""
    yield pair
    for agent in pair.conductor.list():
        pair.conductor.unregister(agent.agent)


def put(
    scene: Scene, agent: str, number: int, device: str | None = None, n_ctx: int = N_CTX
) -> str:
    """Register; where it went."""
    name = model(HEAVY[number])
    info = scene.conductor.register(agent, name, n_ctx=n_ctx, device=device).info
    assert info is not None
    return info.device


def promised(scene: Scene) -> dict[str, int]:
    return {d.device: d.promised.promised_bytes for d in scene.conductor.status().devices}


def test_the_tightest_fit_is_chosen(empty: Scene) -> None:
    # The small one fits both: it goes where less is left. The next fits only the other.
    assert put(empty, "first", 0) == "cpu:0"
    assert put(empty, "second", 1) == "cpu:1"
    assert put(empty, "third", 2) == "cpu:1"
    for agent in ("first", "second", "third"):
        assert empty.run(agent, WORDS[0], max_tokens=3).ids
    # One copy of the weights: another agent of a model goes where that is already.
    assert put(empty, "fourth", 1, n_ctx=256) == "cpu:1"


def test_the_device_that_is_asked_for_is_used(empty: Scene) -> None:
    assert put(empty, "first", 0, "cpu:1") == "cpu:1"
    assert promised(empty)["cpu:0"] == 0
    assert put(empty, "second", 1, "cpu:0") == "cpu:0"
    # It is full now, and the other is not: whoever insists is refused.
    error = refusal(lambda: put(empty, "third", 2, "cpu:0"))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, LEDGER_DENY)
    assert error.details["device"] == "cpu:0"
    assert put(empty, "third", 2) == "cpu:1"
    assert {agent.agent: agent.device for agent in empty.conductor.list()} == {
        "first": "cpu:1",
        "second": "cpu:0",
        "third": "cpu:1",
    }


def test_a_full_device_is_merely_full_while_the_other_serves(empty: Scene, size: Size) -> None:
    put(empty, "full", 0, "cpu:0")
    put(empty, "other", 1, "cpu:1")
    alone = empty.run("full", WORDS[0], conversation="alone", max_tokens=LONG).ids
    workers = [empty.worker_pid(device) for device in ("cpu:0", "cpu:1")]
    running = empty.start("full", WORDS[0], max_tokens=LONG)
    next(running)
    before = promised(empty)
    refusal(lambda: put(empty, "more", 2, "cpu:0"))
    assert promised(empty) == before
    # The other device answers and takes on agents; the full one goes on with what it does.
    assert empty.run("other", WORDS[1], max_tokens=3).usage.queue_ms < WAIT_S * 1000
    assert put(empty, "more", 2) == "cpu:1"
    assert empty.run("more", WORDS[2], max_tokens=3).ids
    assert [job.agent for job in empty.conductor.status().jobs] == ["full"]
    assert running.result(WAIT_S).ids == alone
    assert [empty.worker_pid(device) for device in ("cpu:0", "cpu:1")] == workers


def test_a_refusal_lists_every_device(empty: Scene, size: Size) -> None:
    put(empty, "a", 0, "cpu:0")
    put(empty, "b", 1, "cpu:1")
    put(empty, "c", 2, "cpu:1")
    before = promised(empty)
    extra = Spec(vocab="bytes", n_layer=8, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, seed=63)
    error = refusal(lambda: empty.conductor.register("d", model(extra), n_ctx=N_CTX))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, LEDGER_DENY)
    rows = {row["device"]: row for row in error.details["devices"]}
    assert set(rows) == {"cpu:0", "cpu:1"}
    for device, row in rows.items():
        assert row["code"] == "CAP"
        assert row["ledger_allocated_bytes"] == before[device]
        assert row["requested_bytes"] > row["ledger_max_bytes"] - before[device]
    assert promised(empty) == before
    assert empty.run("c", WORDS[3], max_tokens=2).ids


# --- taking turns with weights ----------------------------------------------------------------


def one_at_a_time(size: Size, mode: str) -> StageDevice:
    """Room for one model and its pool; not for the weights of two."""
    capacity = size.both_bytes + size.weights_bytes // 2
    assert capacity < 2 * size.weights_bytes + size.pool_bytes
    return StageDevice("cpu", capacity, 64 * MIB, mode)


def test_timeshare_serves_models_that_do_not_fit_together(size: Size) -> None:
    with Scene(one_at_a_time(size, "timeshare")) as scene:
        for number, agent in enumerate(("a", "b")):
            assert put(scene, agent, number) == "cpu"
        cap = scene.device().promised.cap_bytes
        assert 2 * size.weights_bytes + size.pool_bytes > cap
        expected = {
            agent: [scene.run(agent, words, conversation="x", max_tokens=4) for words in WORDS[:4]]
            for agent in ("a", "b")
        }
        for answers in expected.values():
            assert not any(answer.usage.swap.evicted for answer in answers[1:])
        for turn in range(4):
            for agent in ("a", "b"):
                found = scene.run(agent, WORDS[turn], max_tokens=4)
                assert found.ids == expected[agent][turn].ids
                evicted = [key.partition(":")[0] for key in found.usage.swap.evicted]
                assert evicted.count("weights") == 1
                assert found.usage.swap.restored == (turn > 0)
                assert found.usage.reprefilled_tokens == 0
                assert scene.device().resident_bytes <= cap
        # Both at once: in turn, within the cap, to their ends.
        replies = [scene.start(agent, WORDS[5], max_tokens=200) for agent in ("a", "b")]
        for reply in replies:
            assert len(reply.result(WAIT_S).ids) == 200
        until(lambda: scene.device().resident_bytes <= cap, "it stays within the cap")
        assert {agent.state for agent in scene.conductor.list()} == {"ready"}


def test_reserve_refuses_the_second_model(size: Size) -> None:
    with Scene(one_at_a_time(size, "reserve")) as scene:
        put(scene, "a", 0)
        before = scene.calm_books()
        error = refusal(lambda: put(scene, "b", 1))
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, LEDGER_DENY)
        assert error.details["code"] == "CAP"
        assert error.details["largest_n_ctx_that_fits"] == 0
        assert scene.books() == before
        usage = scene.run("a", WORDS[0], max_tokens=4).usage
        assert usage.swap.evicted == []
