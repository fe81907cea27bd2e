"""Many threads of one program that use one Conductor, and one conversation: nothing freezes or is
mixed up, and in the worker no two threads ever meet in one object of llama.cpp (case D11)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from gguf_models import Spec
from scene import MIB, WAIT_S, Scene, model, some_tokens
from watched_library import WatchedLibrary

from vram_conductor.client import Conductor
from vram_conductor.client.reply import Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import ConductorError

MODELS = {"one": Spec(vocab="bytes", seed=140), "two": Spec(vocab="bytes", seed=141)}
THREADS = 6
TURNS = 3
TOKENS = 12

T = TypeVar("T")


@pytest.fixture(scope="module", params=["inline", "threads"])
def crowd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, WatchedLibrary]]:
    """Two agents of two models, and one more of the first; room for the pool of one model."""
    with pytest.MonkeyPatch.context() as patch:
        library = WatchedLibrary(tmp_path_factory.mktemp("crowd"), patch)
        device = StageDevice(capacity_bytes=3 * MIB, host_cap_bytes=128 * MIB)
        with Scene(device, worker=f'lanes = "{request.param}"') as scene:
            for name, spec in MODELS.items():
                scene.conductor.register(name, model(spec), n_ctx=1024)
            yield scene, library
            assert library.clashes == []
            calls = library.events("closed")
            assert len(calls) > 4 * THREADS * TURNS, "the watch has seen samplers come and go"


def words(thread: int, turn: int) -> list[int]:
    return some_tokens(20, 100 * thread + turn)


def talk(scene: Scene, thread: int, prefix: str) -> list[list[int]]:
    """A few turns of a conversation of its own; what was said."""
    agent = list(MODELS)[thread % len(MODELS)]
    name = f"{prefix}-{thread}"
    return [
        scene.run(agent, words(thread, turn), conversation=name, max_tokens=TOKENS).ids
        for turn in range(TURNS)
    ]


def bustle(scene: Scene, stop: threading.Event, number: int) -> int:
    """Everything else that a program asks for, until it is over; how often."""
    conductor, rounds = scene.conductor, 0
    while not stop.is_set():
        name, copy = f"bustle-{number}", f"copy-{number}"
        scene.run("one", words(90 + number, rounds), conversation=name, max_tokens=2)
        conductor.fork("one", copy, conversation=name)
        assert conductor.history("one", copy).turns
        given_up = scene.start("two", words(number, rounds), conversation=name, max_tokens=400)
        conductor.status()
        given_up.cancel()
        assert given_up.result(WAIT_S).usage.stop_reason == "cancelled"
        conductor.list()
        conductor.reset("one", name)
        conductor.forget("one", copy)
        rounds += 1
    return rounds


def at_once(*calls: Callable[[], T]) -> list[T]:
    """All of them at the same time; what they return."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


def test_threads_with_conversations_of_their_own(crowd: tuple[Scene, WatchedLibrary]) -> None:
    scene, _ = crowd
    alone = [talk(scene, thread, "alone") for thread in range(THREADS)]
    stop = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(bustle, scene, stop, number) for number in range(2)]
        try:
            found = at_once(*(partial(talk, scene, n, "crowd") for n in range(THREADS)))
        finally:
            stop.set()
        rounds = [other.result(WAIT_S) for other in others]
    assert found == alone
    assert min(rounds) > 0


def test_threads_in_one_conversation_take_turns(crowd: tuple[Scene, WatchedLibrary]) -> None:
    scene, _ = crowd

    def say(thread: int) -> Result:
        return scene.run("one", words(thread, 0), conversation="shared", max_tokens=TOKENS)

    results = at_once(*(partial(say, n) for n in range(THREADS)))
    order = sorted(range(THREADS), key=lambda thread: results[thread].usage.state_version)
    assert [results[t].usage.state_version for t in order] == list(range(1, THREADS + 1))
    # Said one after the other, in the order in which they got their turns, it is the same.
    for thread in order:
        again = scene.run("one", words(thread, 0), conversation="again", max_tokens=TOKENS)
        assert again.ids == results[thread].ids
    records = [scene.conductor.history("one", name, ids=True).ids for name in ("shared", "again")]
    assert records[0] == records[1]


def test_one_pool_of_many_slots(crowd: tuple[Scene, WatchedLibrary]) -> None:
    scene, library = crowd
    scene.conductor.register("wide", model(MODELS["one"]), n_ctx=256, slots=3)

    def say(thread: int, turn: int = 0) -> Result:
        name = f"wide-{thread}"
        return scene.run("wide", words(thread, turn), conversation=name, max_tokens=TOKENS)

    for turn in range(TURNS):
        for result in at_once(*(partial(say, n, turn) for n in range(THREADS))):
            assert (result.usage.generated_tokens, result.usage.reprefilled_tokens) == (TOKENS, 0)
            assert result.usage.state_version == turn + 1
    assert library.clashes == []
    scene.conductor.unregister("wide")


def test_a_conductor_that_is_closed_under_its_threads(crowd: tuple[Scene, WatchedLibrary]) -> None:
    scene, _ = crowd
    conductor = Conductor(scene.stage.endpoint, client="short-lived")
    begun = threading.Barrier(THREADS + 1)

    def read(thread: int) -> str:
        reply = conductor.decode(
            "two", tokens=words(thread, 0), conversation=f"cut-{thread}", max_tokens=900
        )
        begun.wait(WAIT_S)
        try:
            for _ in reply:
                pass
        except ConductorError as error:
            return error.reason
        return "done"

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(read, thread) for thread in range(THREADS)]
        begun.wait(WAIT_S)
        conductor.close()
        ends = [future.result(WAIT_S) for future in futures]
    assert set(ends) == {"closed"}
    # And whoever goes on finds everything as it should be.
    assert talk(scene, 1, "after") == talk(scene, 1, "after-that")


def test_the_watch_sees_two_threads_in_one_object(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    from library_watch.sitecustomize import Watch

    watch = Watch(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def decode(context: int) -> int:
        inside.set()
        assert leave.wait(WAIT_S)
        return context

    slow = watch.calling(decode, "llama_decode")
    quick = watch.calling(abs, "llama_get_logits_ith")
    thread = threading.Thread(target=slow, args=(7,))
    thread.start()
    assert inside.wait(WAIT_S)
    quick(8)
    (file,) = tmp_path.glob("*.jsonl")
    assert file.read_text() == "", "another object"
    quick(7)
    leave.set()
    thread.join()
    quick(7)
    assert file.read_text().count("clash") == 1
