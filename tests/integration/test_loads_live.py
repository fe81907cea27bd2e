"""Loads under way, of real models through the whole product: who waits for one, who stops waiting,
who comes while something has to leave for it (cases B6, B8, B10, D7)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from broker_process import RawClient
from gguf_models import Spec, make_model
from scene import MIB, SMOL, WAIT_S, Scene, model, refusal, some_tokens, until
from watched_library import WatchedLibrary

from vram_conductor.client.probing import estimates
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import DeadlineExceeded
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Bye, Cancel, Error, Ok, Register, Unregister

NAMES = "abc"
SPECS = {
    name: Spec(vocab="bytes", seed=120 + n, n_layer=12, n_embd=128, n_ff=512)
    for n, name in enumerate(NAMES)
}
WORDS = {name: some_tokens(30, 120 + n) for n, name in enumerate(NAMES)}
N_CTX = 1024
ROOM = StageDevice(capacity_bytes=320 * MIB, host_cap_bytes=64 * MIB)
_numbers = itertools.count(1)


class Loads:
    """A scene whose workers' loads are watched, and can be held."""

    def __init__(self, scene: Scene, library: WatchedLibrary) -> None:
        self.scene, self.library = scene, library

    def asked(self, rid: bytes, client: RawClient, **fields: Any) -> Register:
        """Send a REGISTER, and wait until the broker has seen it."""
        request = Register(rid=rid, n_ctx=256, **fields)
        client.send(request)
        client.ping()
        return request

    def begun(self, path: str, before: int = 0) -> None:
        """Wait until one load more of this file has begun than before."""
        until(lambda: self.library.loads(path) == before + 1, f"{path} is being loaded")


def loads(
    folder: Path, device: StageDevice, lanes: str, broker: str = "worker_inflight = 32"
) -> Iterator[Loads]:
    with pytest.MonkeyPatch.context() as patch:
        library = WatchedLibrary(folder, patch)
        with Scene(device, worker=f'lanes = "{lanes}"', broker=broker) as scene:
            yield Loads(scene, library)
            assert library.clashes == []


@pytest.fixture(scope="module", params=["inline", "threads"])
def roomy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Room for everything."""
    yield from loads(tmp_path_factory.mktemp("roomy"), ROOM, request.param)


@pytest.fixture(params=["inline", "threads"])
def impatient(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The same; a load that takes too long is given up."""
    yield from loads(tmp_path, ROOM, request.param, "load_timeout_ms = 3000")


@pytest.fixture(scope="module", params=["inline", "threads"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three agents with a model each; room for one of the models."""
    sizes = estimates([make_model(spec) for spec in SPECS.values()], N_CTX)
    alone = [size["weights_bytes"] + size["pool_bytes"] for size in sizes]
    capacity = max(alone) + MIB
    assert capacity < max(alone) + min(size["weights_bytes"] for size in sizes)
    device = StageDevice(capacity_bytes=capacity, host_cap_bytes=128 * MIB, mode="timeshare")
    folder = tmp_path_factory.mktemp("narrow")
    for found in loads(folder, device, request.param):
        for name, spec in SPECS.items():
            found.scene.conductor.register(name, model(spec), n_ctx=N_CTX)
        yield found


def fresh() -> str:
    """The path of a model that nobody has loaded yet."""
    return model(Spec(vocab="bytes", label=f"fresh {next(_numbers)}"))


# --- several who wait for one load ------------------------------------------------------------


@pytest.mark.parametrize("who", ["first", "later"])
@pytest.mark.parametrize("how", ["cancels", "leaves"])
def test_a_load_goes_on_while_anybody_waits_for_it(roomy: Loads, who: str, how: str) -> None:
    scene, path = roomy.scene, fresh()
    clients, rids = [scene.raw() for _ in range(3)], [new_rid() for _ in range(3)]
    with roomy.library.held():
        for client, rid in zip(clients, rids, strict=True):
            roomy.asked(rid, client, agent="shared", model=path, ephemeral=True)
            if client is clients[0]:
                roomy.begun(path)
        gone = 0 if who == "first" else 1
        if how == "cancels":
            clients[gone].send(Cancel(rid=rids[gone]))
            # Told at once, whatever the load does.
            assert clients[gone].expect(Error, rids[gone]).error.reason == "cancelled"
        else:
            clients[gone].send(Bye())
        scene.raw().ping()
        assert roomy.library.copies(path) == 0, "it is still being loaded"
    for number in {0, 1, 2} - {gone}:
        assert clients[number].expect(Ok, rids[number]).body["state"] == "ready"
    assert roomy.library.loads(path) == 1
    assert roomy.library.copies(path) == 1
    assert scene.run("shared", WORDS["a"], max_tokens=4).ids
    for client in clients:
        client.send(Bye())
    until(lambda: roomy.library.copies(path) == 0, "it went with the last who wanted it")


def test_two_agents_of_one_file_and_one_of_them_is_cancelled(roomy: Loads) -> None:
    scene, path = roomy.scene, fresh()
    one, two = scene.raw(), scene.raw()
    with roomy.library.held():
        first = roomy.asked(new_rid(), one, agent="one", model=path)
        roomy.begun(path)
        second = roomy.asked(new_rid(), two, agent="two", model=path)
        one.send(Cancel(rid=first.rid))
        assert one.expect(Error, first.rid).error.reason == "cancelled"
    assert two.expect(Ok, second.rid).body["state"] == "ready"
    assert roomy.library.copies(path) == 1
    assert [agent.agent for agent in scene.conductor.list()] == ["two"]
    scene.conductor.unregister("two")
    until(lambda: roomy.library.copies(path) == 0, "nothing of it is left")


def test_a_job_is_cancelled_while_another_waits_for_the_same_model(narrow: Loads) -> None:
    scene, library = narrow.scene, narrow.library
    path = model(SPECS["b"])
    expected = scene.run("b", WORDS["b"], conversation="alone", max_tokens=6).ids
    scene.run("a", WORDS["a"], max_tokens=2)
    before = library.loads(path)
    with library.held():
        replies = [
            scene.start("b", WORDS["b"], conversation=f"wait-{n}", max_tokens=6) for n in range(3)
        ]
        narrow.begun(path, before)
        replies[0].cancel()
        # Told at once, whatever the load does.
        usage = replies[0].result(WAIT_S).usage
        assert (usage.stop_reason, usage.generated_tokens) == ("cancelled", 0)
        assert library.copies(path) == 0, "it is still being loaded"
    assert [reply.result(WAIT_S).ids for reply in replies[1:]] == [expected] * 2
    assert library.loads(path) == before + 1
    for name in ("alone", "wait-0", "wait-1", "wait-2"):
        scene.conductor.reset("b", name)


# --- what leaves, and who comes meanwhile -----------------------------------------------------


def test_a_request_for_what_is_leaving_while_a_load_waits(narrow: Loads) -> None:
    scene, library = narrow.scene, narrow.library
    alone = {
        name: scene.run(name, WORDS[name], conversation="alone", max_tokens=6).ids for name in NAMES
    }
    scene.run("a", WORDS["a"], max_tokens=2)
    path = model(SPECS["b"])
    before = library.loads(path)
    with library.held():
        waits = [scene.start("b", WORDS["b"], conversation="evicts", max_tokens=6)]
        narrow.begun(path, before)
        assert library.copies(model(SPECS["a"])) == 0
        # Those come back, or come, who have to wait for the one that waits.
        waits += [
            scene.start(name, WORDS[name], conversation=f"back-{n}", max_tokens=6)
            for n, name in enumerate("acab")
        ]
        # Whoever sets a limit to it is told when it is reached, though nothing moves.
        hasty = scene.start("c", WORDS["c"], conversation="hasty", max_tokens=6, queue_ms=300)
        with pytest.raises(DeadlineExceeded) as caught:
            hasty.result(WAIT_S)
        assert caught.value.reason == "queue_timeout"
        jobs = scene.conductor.status().jobs
        assert [job.agent for job in jobs] == ["b", "a", "c", "a", "b"], (
            "and STATUS shows who waits"
        )
    assert [reply.result(WAIT_S).ids for reply in waits] == [alone[name] for name in "bacab"]
    # Nothing hangs behind it: everybody is served again.
    for name in NAMES:
        again = scene.run(name, WORDS[name], conversation="after", max_tokens=6)
        assert again.ids == alone[name]
        for talk in scene.agent(name).conversations:
            scene.conductor.reset(name, talk.conversation)


def test_an_agent_that_is_being_unregistered_takes_nobody_in(narrow: Loads) -> None:
    scene, library = narrow.scene, narrow.library
    scene.run("a", WORDS["a"], max_tokens=2)
    path, brief = model(SPECS["b"]), fresh()
    scene.conductor.register("brief", brief, n_ctx=256)
    client, before = scene.raw(), library.loads(path)
    with library.held():
        waits = scene.start("b", WORDS["b"], max_tokens=6)
        narrow.begun(path, before)
        # The worker cannot do it yet, and the agent is gone all the same.
        goes = new_rid()
        client.send(Unregister(rid=goes, agent="brief"))
        client.ping()
        late = refusal(lambda: scene.run("brief", WORDS["a"], max_tokens=2))
        assert late.reason == "no_such_agent"
        # Its name is free, and the next one that wants it waits for its turn.
        again = Register(rid=new_rid(), agent="brief", model=brief, n_ctx=256)
        client.send(again)
        client.ping()
    assert client.expect(Ok, goes)
    assert client.expect(Ok, again.rid).body["state"] == "ready"
    assert waits.result(WAIT_S).ids
    assert scene.run("brief", WORDS["a"], max_tokens=2).usage.state_version == 1
    scene.conductor.unregister("brief")
    scene.conductor.reset("b")


# --- bursts -----------------------------------------------------------------------------------


def test_a_burst_for_other_models_loads_them_one_at_a_time(narrow: Loads) -> None:
    scene, library = narrow.scene, narrow.library
    alone = {
        name: scene.run(name, WORDS[name], conversation="alone", max_tokens=6).ids for name in NAMES
    }
    begun = {name: library.loads(model(SPECS[name])) for name in NAMES}
    seen, queue = len(library.history()), [name for _ in range(6) for name in NAMES]
    with library.held():
        replies = [
            scene.start(name, WORDS[name], conversation=f"burst-{n}", max_tokens=6)
            for n, name in enumerate(queue)
        ]
        jobs = scene.conductor.status().jobs
        assert len(jobs) == len(queue), "all of them wait"
    assert [reply.result(WAIT_S).ids for reply in replies] == [alone[name] for name in queue]
    for copies, under_way in library.history()[seen:]:
        assert under_way <= 1, "one at a time"
        assert sum(copies.values()) + under_way <= 1, "and never more than there is room for"
    loaded = {name: library.loads(model(SPECS[name])) - begun[name] for name in NAMES}
    assert min(loaded.values()) > 0, "how often is a matter of time slices"
    device = scene.device()
    assert device.promised.promised_bytes <= device.promised.cap_bytes
    for name in NAMES:
        for talk in scene.agent(name).conversations:
            scene.conductor.reset(name, talk.conversation)


def test_a_burst_of_registrations_loads_each_file_once(roomy: Loads) -> None:
    scene, library = roomy.scene, roomy.library
    paths, seen = [fresh() for _ in range(3)], len(library.history())
    client = scene.raw()
    requests = {
        new_rid(): Register(rid=b"", agent=f"burst-{n}", model=paths[n % 3], n_ctx=256)
        for n in range(9)
    }
    for rid, request in requests.items():
        client.send(Register(rid=rid, agent=request.agent, model=request.model, n_ctx=256))
    waiting = set(requests)
    while waiting:
        message = client.receive(int(WAIT_S * 1000))
        assert not isinstance(message, Error), message
        waiting -= {message.rid} if isinstance(message, Ok) else set()
    assert [library.loads(path) for path in paths] == [1, 1, 1]
    for copies, under_way in library.history()[seen:]:
        assert under_way <= 1
        assert all(copies[path] <= 1 for path in paths)
    for request in requests.values():
        scene.conductor.unregister(request.agent)
    until(lambda: not any(library.copies(path) for path in paths), "they are gone")


# --- loads that are given up ------------------------------------------------------------------


def cancelled(loads: Loads, client: RawClient, request: Register) -> None:
    client.send(Cancel(rid=request.rid))
    assert client.expect(Error, request.rid).error.reason == "cancelled"


def left(loads: Loads, client: RawClient, request: Register) -> None:
    client.send(Bye())


def unregistered(loads: Loads, client: RawClient, request: Register) -> None:
    client.send(Unregister(rid=new_rid(), agent=request.agent))
    assert client.expect(Error, request.rid)


@pytest.mark.real
@pytest.mark.parametrize("give_up", [cancelled, left, unregistered])
def test_a_load_that_is_given_up_leaves_no_second_copy(
    roomy: Loads, smollm2: Path, give_up: Callable[[Loads, RawClient, Register], None]
) -> None:
    scene, library = roomy.scene, roomy.library
    path, worker = str(smollm2), psutil.Process(roomy.scene.worker_pid())
    before = scene.calm_books()
    scene.conductor.register("real", SMOL, n_ctx=256)
    with_one = worker.memory_info().rss
    scene.conductor.unregister("real")
    for _ in range(2):
        client, begun = scene.raw(), library.loads(path)
        with library.held():
            request = roomy.asked(new_rid(), client, agent="real", model=SMOL, ephemeral=True)
            roomy.begun(path, begun)
            give_up(roomy, client, request)
        until(lambda: library.history()[-1][1] == 0, "the load has ended")
        until(lambda: library.copies(path) == 0, "and what it had loaded is gone")
        scene.settled(before)
    scene.conductor.register("real", SMOL, n_ctx=256)
    assert library.copies(path) == 1
    assert max(copies[path] for copies, _ in library.history()) == 1, "there never were two"
    assert worker.memory_info().rss < with_one + smollm2.stat().st_size // 2
    assert scene.run("real", some_tokens(5, 1, 40_000), max_tokens=2).ids
    scene.conductor.unregister("real")
    scene.settled(before)


def test_a_load_that_takes_too_long_leaves_nothing(impatient: Loads) -> None:
    scene, library, path = impatient.scene, impatient.library, fresh()
    client, before = scene.raw(), scene.books()
    with library.held():
        request = impatient.asked(new_rid(), client, agent="slow", model=path)
        error = client.expect(Error, request.rid).error
        assert (error.reason, error.retryable) == ("worker_timeout", True)
        assert library.history()[-1] == ({}, 1), "it has not ended yet"
        # Whoever asks again waits for the same worker, and is told so in his turn.
        again = impatient.asked(new_rid(), client, agent="slow", model=path)
    assert client.expect(Ok, again.rid).body["state"] == "ready"
    assert library.copies(path) == 1
    assert max(copies[path] for copies, _ in library.history()) == 1
    assert scene.run("slow", WORDS["a"], max_tokens=4).ids
    scene.conductor.unregister("slow")
    scene.settled(before)
    assert library.copies(path) == 0
