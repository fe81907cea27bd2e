"""A worker is replaced while clients wait: by hand, by the supervisor, by one of another build; and
workers that must not serve: of another protocol, a second one, one that was given up."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import llama_cpp
import pytest
from broker_process import BrokerProcess
from gguf_models import Spec
from scene import MIB, WAIT_S, Scene, model, refusal, some_tokens, until
from worker_process import WorkerProcess

from vram_conductor.client import Conductor
from vram_conductor.client.reply import Reply, Result
from vram_conductor.client.stage import StageDevice
from vram_conductor.protocol.errors import Aborted, Unavailable
from vram_conductor.protocol.status import WorkerStatus

ROOM = StageDevice(capacity_bytes=256 * MIB, host_cap_bytes=128 * MIB)
SECOND = Spec(vocab="bytes", seed=5)
WORDS = [some_tokens(40, seed) for seed in (1, 2, 3, 4)]
LIBRARIES = Path(llama_cpp.__file__).parent / "lib"


class Talks:
    """Conversations that several clients go on with at once, and what each is to answer."""

    def __init__(self, scene: Scene, count: int) -> None:
        self._scene = scene
        self._turn = 0
        self._names = [(agent, f"talk-{i}") for i in range(count) for agent in ("a", "b")]
        self._expected: dict[str, list[list[int]]] = {}
        for agent in ("a", "b"):
            said = [scene.run(agent, ids, conversation="reference", max_tokens=8) for ids in WORDS]
            self._expected[agent] = [answer.ids for answer in said]
            scene.conductor.reset(agent, "reference")

    def ask(self, pool: ThreadPoolExecutor) -> list[Future[Result]]:
        """The next turn of every conversation, each by a thread of its own."""
        turn, self._turn = self._turn, self._turn + 1
        return [
            pool.submit(self._scene.run, agent, WORDS[turn], conversation=name, max_tokens=8)
            for agent, name in self._names
        ]

    def check(self, asked: list[Future[Result]], reprefilled: Callable[[Result], bool]) -> None:
        """Every one was answered, once, with the very tokens."""
        for (agent, _), future in zip(self._names, asked, strict=True):
            answer = future.result(WAIT_S)
            assert answer.ids == self._expected[agent][self._turn - 1]
            assert answer.usage.state_version == self._turn
            assert reprefilled(answer), answer.usage


def nothing_again(answer: Result) -> bool:
    return answer.usage.reprefilled_tokens == 0


def worker(conductor: Conductor, but: int = 0) -> WorkerStatus:
    """The worker that serves the cpu; waits for one with another pid than ``but``."""

    def look() -> WorkerStatus | None:
        found = conductor.status().devices[0].worker
        return found if found is not None and found.pid != but else None

    found = until(look, "a worker serves")
    assert found is not None
    return found


# --- the worker of a supervisor -----------------------------------------------------------------


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(ROOM) as scene:
        scene.conductor.register("a", model(), n_ctx=4096, slots=2)
        scene.conductor.register("b", model(SECOND), n_ctx=4096)
        yield scene


def test_a_worker_is_replaced_while_clients_wait_and_nothing_is_lost(scene: Scene) -> None:
    talks = Talks(scene, 3)
    with ThreadPoolExecutor(32) as pool:
        talks.check(talks.ask(pool), nothing_again)
        old = worker(scene.conductor)
        running = scene.start("a", WORDS[0], conversation="long", max_tokens=400)
        next(running)
        left = pool.submit(scene.conductor.drain, "cpu", drain_s=60, worker_epoch=old.worker_epoch)
        until(lambda: left.done() or worker(scene.conductor).draining, "the worker was told")
        asked = talks.ask(pool)
        late = pool.submit(scene.conductor.register, "late", model(), n_ctx=512)
        receipt = left.result(WAIT_S)
        assert (receipt.pid, receipt.build, receipt.cut_off) == (old.pid, old.build, 0)
        assert receipt.finished >= 1
        # What ran was let go on to its end, by the worker that leaves.
        assert len(running.result(WAIT_S).ids) == 400
        talks.check(asked, nothing_again)
        assert late.result(WAIT_S).info is not None
    new = worker(scene.conductor, but=old.pid)
    assert new.build == old.build
    assert scene.run("late", WORDS[0], max_tokens=2).ids
    assert any("has left: starting its successor" in line for line in scene.news), scene.news
    log = scene.stage.log.read_text()
    assert "worker_draining" in log
    assert "worker_build_changed" not in log
    # The same request again, as after a lost answer, does not send the next one away.
    with pytest.raises(Aborted) as caught:
        scene.conductor.drain("cpu", worker_epoch=old.worker_epoch)
    assert caught.value.reason == "worker_replaced"
    assert worker(scene.conductor).pid == new.pid


def test_what_runs_for_too_long_is_cut_off_and_goes_on_where_it_was(scene: Scene) -> None:
    running = scene.start("a", WORDS[0], conversation="cut", max_tokens=3000)
    next(running)
    receipt = scene.conductor.drain("cpu", drain_s=0.2)
    assert (receipt.finished, receipt.cut_off) == (0, 1)
    with pytest.raises(Unavailable) as caught:
        running.result(WAIT_S)
    assert (caught.value.reason, caught.value.retryable) == ("worker_left", True)
    kept = caught.value.details["generated_tokens"]
    assert 0 < kept < 3000
    expected = scene.run("a", WORDS[0], conversation="whole", max_tokens=len(running.ids)).ids
    assert running.ids == expected
    more = scene.run("a", WORDS[1], conversation="cut", max_tokens=4).usage
    assert (more.state_version, more.prompt_tokens) == (2, len(WORDS[0]) + kept + len(WORDS[1]))
    assert more.reprefilled_tokens == 0, "it was parked as far as it had come"


def test_the_next_worker_has_another_build(scene: Scene, tmp_path: Path) -> None:
    talks = Talks(scene, 2)
    with ThreadPoolExecutor(32) as pool:
        talks.check(talks.ask(pool), nothing_again)
        old = worker(scene.conductor)
        upgrade(scene, tmp_path / "lib")
        before = scene.calm_books().promised
        receipt = scene.conductor.drain("cpu")
        assert receipt.build == old.build
        talks.check(talks.ask(pool), lambda answer: answer.usage.reprefill_reason == "other_build")
        new = worker(scene.conductor, but=old.pid)
        assert new.build != old.build
        talks.check(talks.ask(pool), nothing_again)
    assert scene.books().promised == before, "asked anew, and the same"
    log = scene.stage.log.read_text()
    assert f"parked states of build {old.build} are of no use to this build {new.build}" in log
    assert "worker_build_changed" in log
    assert old.build in log.split("worker_build_changed")[1].splitlines()[0]


def test_the_broker_is_replaced_while_clients_wait_and_nothing_is_lost(scene: Scene) -> None:
    talks = Talks(scene, 3)
    with ThreadPoolExecutor(32) as pool:
        talks.check(talks.ask(pool), nothing_again)
        before, epoch = scene.calm_books(), scene.conductor.broker_epoch
        running = scene.start("a", WORDS[0], conversation="long", max_tokens=300)
        behind = scene.start("a", WORDS[1], conversation="long", max_tokens=8)
        next(running)
        os.kill(scene.broker_pid(), signal.SIGTERM)
        asked = talks.ask(pool)
        late = pool.submit(scene.conductor.register, "late", model(), n_ctx=512)
        assert len(running.result(WAIT_S).ids) == 300, "what runs is let go on to its end"
        talks.check(asked, nothing_again)
        assert behind.result(WAIT_S).usage.state_version == 2
        assert late.result(WAIT_S).info is not None
    assert scene.conductor.broker_epoch > epoch
    scene.conductor.unregister("late")
    until(lambda: scene.books().promised == before.promised, "the ledger is as before")


def upgrade(scene: Scene, folder: Path) -> None:
    """Install another build of the library for the next worker: the same one with other bytes."""
    shutil.copytree(LIBRARIES, folder)
    with (folder / "libllama.so").open("ab") as file:
        file.write(b"another build")
    env = scene.stage.supervisor.env
    assert isinstance(env, dict)
    env["LLAMA_CPP_LIB_PATH"] = str(folder)


# --- workers that were started by hand ----------------------------------------------------------


@contextmanager
def by_hand(folder: Path, *, config: str = "", builds: str = "[]") -> Generator[ByHand]:
    """A broker and one worker, no supervisor. ``builds``: of workers that the broker takes."""
    path = folder / "conductor.toml"
    path.write_text(
        f"[broker]\nheartbeat_ms = 500\nbuilds = {builds}\n{config}\n"
        f'[[device]]\nid = "cpu"\nkind = "cpu"\ncapacity = "160 MiB"\nhost_cap = "64 MiB"\n'
    )
    with ExitStack() as stack:
        broker = stack.enter_context(BrokerProcess(folder, "--config", str(path)))
        hand = ByHand(folder, path, broker, stack)
        hand.first = hand.start()
        hand.conductor = stack.enter_context(Conductor(broker.endpoints["clients"]))
        if builds == "[]":
            worker(hand.conductor)
        yield hand


class ByHand:
    """What an operator has: a broker, its workers' command lines, and ``conductor``."""

    first: WorkerProcess
    conductor: Conductor

    def __init__(self, folder: Path, config: Path, broker: BrokerProcess, stack: ExitStack) -> None:
        self.folder, self.broker = folder, broker
        self._config, self._stack = config, stack

    def start(self, where: str = "w", *, code: str = "") -> WorkerProcess:
        """A worker; those with the same ``where`` share their parked states."""
        flags = ["--config", str(self._config)]
        endpoint = self.broker.endpoints["workers"]
        process = WorkerProcess(self.folder / where, endpoint, *flags, code=code)
        return self._stack.enter_context(process)

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``conductor WORDS``."""
        command = [sys.executable, "-m", "vram_conductor.client.cli", *words]
        command += ["--clients", self.broker.endpoints["clients"]]
        return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)

    def turn(self, number: int, name: str = "main") -> Result:
        return self.ask(number, name).result(WAIT_S)

    def ask(self, number: int, name: str = "main") -> Reply:
        return self.conductor.decode(
            "a",
            tokens=WORDS[number],
            continue_=True,
            conversation=name,
            max_tokens=6,
            temperature=0,
            return_ids=True,
        )


def test_the_operators_commands(short_tmp: Path) -> None:
    with by_hand(short_tmp) as hand:
        hand.conductor.register("a", model(), n_ctx=1024)
        expected = [hand.turn(number, "reference").ids for number in range(3)]
        found = [hand.turn(0).ids]
        said = hand.say("drain", "--json")
        assert said.returncode == 0, said.stderr
        receipt = json.loads(said.stdout)
        assert (receipt["device"], receipt["pid"]) == ("cpu", hand.first.process.pid)
        assert hand.first.process.wait(WAIT_S) == 0
        waiting = hand.ask(1)
        with ThreadPoolExecutor() as pool:
            late = pool.submit(hand.conductor.register, "late", model(SECOND), n_ctx=512)
            job = until(lambda: hand.conductor.status().jobs, "the job waits")[0]
            assert (job.state, job.waiting) == ("queued", "worker")
            status = hand.say("status").stdout
            assert "the last one was stopped; jobs wait" in status
            second = hand.start()
            found.append(waiting.result(WAIT_S).ids)
            assert late.result(WAIT_S).info is not None
        last = hand.turn(2)
        assert [*found, last.ids] == expected
        assert last.usage.reprefilled_tokens == 0
        hand.say("drain", "cpu")
        assert second.process.wait(WAIT_S) == 0
        again = hand.say("drain")
        assert again.returncode == 6
        assert f"pid {second.process.pid} on" in again.stderr
        assert "conductor worker --device cpu" in again.stderr
        unknown = hand.say("drain", "cuda:7")
        assert (unknown.returncode, "cpu" in unknown.stderr) == (8, True)


def test_without_a_successor_whoever_waits_is_told_in_time(short_tmp: Path) -> None:
    with by_hand(short_tmp, config="worker_wait_ms = 1") as hand:
        hand.conductor.drain("cpu", hold_s=0.5)
        error = refusal(lambda: hand.conductor.register("a", model(), n_ctx=512))
        assert (error.reason, error.retryable) == ("no_worker", True)
        assert f"pid {hand.first.process.pid} on" in error.message
        assert "was stopped" in error.message


OTHER_PROTOCOL = """
import sys
from vram_conductor.protocol import limits
limits.PROTOCOL_MAJOR, limits.PREAMBLE = 2, b"VMC\\x02"
from vram_conductor.worker.app import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_worker_of_another_protocol_is_refused_with_both_versions(short_tmp: Path) -> None:
    with by_hand(short_tmp) as hand:
        hand.conductor.register("a", model(), n_ctx=1024)
        expected = [hand.turn(number, "reference").ids for number in range(2)]
        stranger = hand.start("other", code=OTHER_PROTOCOL)
        assert stranger.process.wait(WAIT_S) == 69, "starting it again cannot help"
        assert "the peer speaks protocol 1, this side speaks 2" in stranger.log
        log = hand.broker.log
        assert "the peer speaks protocol 2" in log or ("theirs=2" in log and "ours=1" in log), log
        assert [hand.turn(number).ids for number in range(2)] == expected


def test_a_worker_of_another_build_than_the_broker_takes(short_tmp: Path) -> None:
    with by_hand(short_tmp, builds='["llama-cpp-python-0.0.1"]') as hand:
        assert hand.first.process.wait(WAIT_S) == 69
        for log in (hand.first.log, hand.broker.log):
            assert "unsupported_build" in log
            assert "llama-cpp-python-0.0.1" in log
            assert f"llama-cpp-python-{llama_cpp.__version__}+" in log


# --- two for one device -------------------------------------------------------------------------


def test_a_second_worker_of_a_device_is_refused_and_the_first_goes_on(short_tmp: Path) -> None:
    with by_hand(short_tmp) as hand:
        hand.conductor.register("a", model(), n_ctx=1024)
        expected = [hand.turn(number, "reference").ids for number in range(2)]
        found = [hand.turn(0).ids]
        second = hand.start("elsewhere")
        assert second.process.wait(WAIT_S) == 69
        assert f"device_taken: device cpu is served by cpu@{os.uname().nodename}" in second.log
        assert f"pid {hand.first.process.pid} on {os.uname().nodename}" in second.log
        third = hand.start()
        assert third.process.wait(WAIT_S) == 69
        assert f"arena_in_use: another worker (pid {hand.first.process.pid})" in third.log
        assert [*found, hand.turn(1).ids] == expected
        assert worker(hand.conductor).pid == hand.first.process.pid


def test_a_worker_that_comes_back_after_a_crash_is_not_refused(short_tmp: Path) -> None:
    with by_hand(short_tmp) as hand:
        hand.conductor.register("a", model(), n_ctx=1024)
        expected = [hand.turn(number, "reference").ids for number in range(2)]
        found = [hand.turn(0).ids]
        hand.first.kill()
        second = hand.start()
        last = hand.turn(1)
        assert [*found, last.ids] == expected
        assert last.usage.reprefilled_tokens == 0
        assert worker(hand.conductor).pid == second.process.pid


def test_a_worker_that_was_given_up_does_not_take_the_device_back(short_tmp: Path) -> None:
    with by_hand(short_tmp) as hand:
        hand.conductor.register("a", model(), n_ctx=1024)
        expected = [hand.turn(number, "reference").ids for number in range(2)]
        found = [hand.turn(0).ids]
        hand.first.process.send_signal(signal.SIGSTOP)
        second = hand.start("elsewhere")
        assert worker(hand.conductor, but=hand.first.process.pid).pid == second.process.pid
        found.append(hand.turn(1).ids)
        hand.first.process.send_signal(signal.SIGCONT)
        assert hand.first.process.wait(WAIT_S) == 69
        assert f"pid {second.process.pid} on" in hand.first.log
        assert found == expected
        assert worker(hand.conductor).pid == second.process.pid
