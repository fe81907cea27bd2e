"""The engine loop with a fake engine, real arenas and a list instead of a socket."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeDevice, FakeEngine, ModelSpec

from vram_conductor.protocol.catalogue import Catalogue
from vram_conductor.protocol.commands import (
    Budget,
    Drain,
    Failed,
    Load,
    Loaded,
    Ready,
    Residency,
    Run,
    RunDone,
    RunTokens,
    Started,
    Unload,
    WorkerBye,
    WorkerOk,
    WorkerWelcome,
)
from vram_conductor.protocol.errors import Code, ErrorInfo, Internal
from vram_conductor.protocol.values import (
    AgentKey,
    ConversationKey,
    DeviceInfo,
    Memory,
    PoolShape,
    Sampling,
)
from vram_conductor.worker.arena_dir import ArenaDir
from vram_conductor.worker.core import Core
from vram_conductor.worker.digest import Digester
from vram_conductor.worker.exits import EXIT_TEMPORARY
from vram_conductor.worker.identity import Identity
from vram_conductor.worker.inbound import Arrived, ReadyWanted, Refused, SessionLost
from vram_conductor.worker.kvstore import KVStore
from vram_conductor.worker.lane import InlineLanes, Lanes, ThreadLanes
from vram_conductor.worker.loop import EngineLoop, Inbox, Stop, Wake
from vram_conductor.worker.outbox import Sent
from vram_conductor.worker.resolver import Resolver

SPEC = ModelSpec("tiny")
SHAPE = PoolShape(cells=256, slots=1)
MAIN = ConversationKey("local", "coder", "main")


class Samples:
    """A device that others use more and more."""

    def __init__(self) -> None:
        self.foreign = 0

    def info(self) -> DeviceInfo:
        return DeviceInfo(device="cpu", kind="cpu", name="fake", total_bytes=1 << 30)

    def sample(self, own_bytes: int) -> Memory:
        self.foreign += 1
        return Memory(
            used_bytes=own_bytes + self.foreign, own_bytes=own_bytes, foreign_bytes=self.foreign
        )


class Life:
    """One life of a worker; messages that it sends are in ``sent``."""

    def __init__(
        self,
        folder: Path,
        worker_epoch: int = 7,
        *,
        threads: bool = False,
        drain_ms: int = 2000,
    ) -> None:
        self.sent: list[Any] = []
        self.leave_after: type[Any] | None = None
        self.inbox: Inbox = queue.SimpleQueue()
        self.store = KVStore(ArenaDir(folder, "cpu"), 1 << 26)
        self.engine = engine = FakeEngine([SPEC], FakeDevice())
        self.lanes: Lanes = InlineLanes()
        if threads:
            self.lanes = ThreadLanes(lambda: self.inbox.put(Wake()))
        core = Core(
            engine,
            self.store,
            worker_epoch=worker_epoch,
            clock=time.monotonic_ns,
            draw_seed=lambda: 1,
            lanes=self.lanes,
            prefetch=threads,
        )
        self.digester = Digester(enabled=False)
        resolver = Resolver(Catalogue(), folder, folder, [])
        identity = Identity(worker_epoch, "0", engine.build, 0, self.store.capacity_bytes, "")
        self.worn = False
        self.loop = EngineLoop(
            core,
            self.store,
            self,
            self.inbox,
            Samples(),
            resolver,
            self.digester,
            identity,
            2000,
            drain_ms,
            lambda: self.worn,
        )
        self._op = 0

    def send(self, *messages: Sent) -> None:
        self.sent += [message for message, _ in messages]
        if self.leave_after and any(isinstance(item, self.leave_after) for item, _ in messages):
            self.leave_after = None
            self.inbox.put(Stop("test"))

    def welcome(self, known: list[ConversationKey] | None = None, epoch: int = 1) -> None:
        self.inbox.put(
            Arrived(
                WorkerWelcome(
                    v=(1, 0), broker_epoch=epoch, heartbeat_ms=100, conversations=known or []
                ),
                [],
            )
        )

    def command(self, kind: Any, **fields: Any) -> int:
        self._op += 1
        self.inbox.put(Arrived(kind(broker_epoch=1, op=self._op, **fields), []))
        return self._op

    def load(self) -> int:
        return self.command(
            Load,
            agent=AgentKey("local", "coder"),
            model=SPEC.model,
            path=SPEC.path,
            shape=SHAPE,
            n_ctx=200,
            state_bytes=1000,
            weights_bytes=SPEC.weights_bytes,
            pool_bytes=SPEC.pool_bytes(SHAPE),
            budget_bytes=1 << 20,
        )

    def run_job(self, max_tokens: int | None = 5, **fields: Any) -> int:
        fields = {"version": 0, "transcript_tokens": 0, **fields}
        return self.command(
            Run,
            job=self._op + 1,
            conversation=MAIN,
            prompt="abc",
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0.0),
            **fields,
        )

    def leave(self, after: type[Any] | None = None) -> int:
        """Run to the end, which comes at once or once a message of this type was sent."""
        self.leave_after = after
        if after is None:
            self.inbox.put(Stop("test"))
        code = self.loop.run()
        self.close()
        return code

    def close(self) -> None:
        self.lanes.close()
        self.digester.close()
        self.store.close()

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


@pytest.fixture(params=["inline", "threads"])
def life(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Life]:
    made = Life(tmp_path / "arenas", threads=request.param == "threads")
    yield made
    made.close()


def test_a_whole_life(life: Life, tmp_path: Path) -> None:
    life.inbox.put(ReadyWanted())
    life.welcome()
    load = life.load()
    run = life.run_job()
    assert life.leave(after=RunDone) == 0
    (ready,) = life.of(Ready)
    assert (ready.worker_epoch, ready.parked, ready.base_bytes) == (7, [], 0)
    (loaded,) = life.of(Loaded)
    assert loaded.op == load
    assert life.of(Started)[0].op == life.of(RunDone)[0].op == run
    assert isinstance(life.sent[-1], WorkerBye)
    assert life.of(WorkerOk), "the drain was answered"
    assert life.sent.index(loaded) < life.sent.index(life.of(Started)[0])
    again = Life(tmp_path / "arenas", worker_epoch=8)
    again.inbox.put(ReadyWanted())
    again.welcome([MAIN])
    assert again.leave() == 0
    (ready,) = again.of(Ready)
    assert [state.conversation for state in ready.parked] == [MAIN]


def test_who_leaves_says_so_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vram_conductor")
    life = Life(tmp_path / "arenas")
    life.welcome()
    life.load()
    life.run_job()
    assert life.leave(after=RunDone) == 0
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert "leaving: test" in said
    assert said[-1].startswith("drained: 1 conversation is parked (")
    assert said[-1].endswith(" bytes) for the next worker; goodbye")
    caplog.clear()
    again = Life(tmp_path / "others")
    again.welcome()
    again.command(Drain, drain_ms=50)
    assert again.loop.run() == 0
    again.close()
    assert [record.getMessage() for record in caplog.records] == [
        "leaving: the broker asks for it; what runs has 50 ms",
        "drained: nothing is parked; goodbye",
    ]


def test_reports_follow_the_welcome_and_carry_the_epochs(life: Life) -> None:
    life.welcome()
    life.load()
    life.leave()
    reports = life.of(Residency)
    assert reports
    assert all((found.broker_epoch, found.worker_epoch) == (1, 7) for found in reports)
    assert [found.seq for found in reports] == sorted({found.seq for found in reports})
    assert reports[-1].memory.own_bytes == sum(line.bytes for line in reports[-1].lines)


def test_an_unload_is_done_once_its_memory_was_looked_at(life: Life) -> None:
    """However little time has passed since the last report."""
    life.welcome()
    life.load()
    life.leave_after = Loaded
    done = [life.command(Unload, agent=AgentKey("local", "coder")) for _ in range(2)]
    life.loop.run()
    for op in done:
        (answer,) = [found for found in life.of(WorkerOk) if found.op == op]
        before = life.sent[: life.sent.index(answer)]
        report = [found for found in before if isinstance(found, Residency)][-1]
        assert not [line for line in report.lines if line.key.startswith(("weights", "pool"))]
        assert report.memory.foreign_bytes > 0


def test_nothing_is_reported_without_a_session(life: Life) -> None:
    life.leave()
    assert not life.of(Residency)


def test_a_lost_session_ends_what_runs(life: Life) -> None:
    life.welcome()
    life.load()
    op = life.run_job(max_tokens=None)
    life.inbox.put(SessionLost())
    life.leave()
    (end,) = [found for found in life.of(RunDone) if found.op == op]
    assert end.usage.stop_reason == "cancelled"
    assert end.usage.generated_tokens == 0


def test_commands_of_a_former_epoch_are_ignored(life: Life) -> None:
    life.welcome(epoch=2)
    life.command(Budget, budget_bytes=5)
    life.leave()
    assert all(found.broker_epoch == 2 for found in life.of(WorkerOk))


@pytest.mark.parametrize(("reason", "code"), [("device_taken", 69), ("stale_worker", 75)])
def test_a_refusal_ends_the_loop(life: Life, reason: str, code: int) -> None:
    life.inbox.put(Refused(ErrorInfo(Code.ABORTED, reason, "no")))
    assert life.loop.run() == code


@pytest.mark.parametrize("threads", [False, True])
def test_a_second_signal_cancels_what_the_first_lets_finish(tmp_path: Path, threads: bool) -> None:
    life = Life(tmp_path / "arenas", threads=threads, drain_ms=600_000)
    life.welcome()
    life.load()
    op = life.run_job(max_tokens=None)
    life.inbox.put(Stop("SIGTERM"))
    life.inbox.put(Stop("SIGTERM"))
    begin = time.monotonic()
    assert life.loop.run() == 0
    assert time.monotonic() - begin < 60, "it did not wait for the drain's end"
    life.close()
    ends = [found for found in life.sent if isinstance(found, RunDone | Failed) and found.op == op]
    assert len(ends) == 1


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("drain_ms", [0, 600_000])
def test_what_runs_may_go_on_for_as_long_as_was_configured(
    tmp_path: Path, threads: bool, drain_ms: int
) -> None:
    life = Life(tmp_path / "arenas", threads=threads, drain_ms=drain_ms)
    life.welcome()
    life.load()
    op = life.run_job(max_tokens=None)
    assert life.leave(after=RunTokens) == 0
    ends = [found for found in life.sent if isinstance(found, RunDone | Failed)]
    (end,) = [found for found in ends if found.op == op]
    if drain_ms:
        assert isinstance(end, RunDone)
        assert (end.usage.stop_reason, end.usage.generated_tokens) == ("eos", 10)
    else:
        assert isinstance(end, Failed)
        assert end.error.reason == "worker_draining"


def test_what_a_loader_says_while_draining(life: Life) -> None:
    life.welcome()
    life.inbox.put(Stop("SIGTERM"))
    op = life.load()
    assert life.loop.run() == 0
    (failed,) = [found for found in life.of(Failed) if found.op == op]
    assert failed.error.retryable


def test_progress_is_what_the_watchdog_sees(life: Life) -> None:
    assert life.loop.progress() == (0, False)
    life.welcome()
    life.load()
    life.run_job()
    life.leave(after=RunDone)
    steps, busy = life.loop.progress()
    assert steps >= 3, "a load, and at least two batches"
    assert not busy


def test_a_process_that_keeps_memory_makes_room_for_a_new_one(short_tmp: Path) -> None:
    """It leaves with the code that the supervisor starts again after; what was said is parked."""
    life = Life(short_tmp)
    life.welcome()
    life.load()
    life.run_job()

    def done(*messages: Sent) -> None:
        life.sent += [message for message, _ in messages]
        life.worn = any(isinstance(message, RunDone) for message in life.sent)
        if life.worn:
            life.inbox.put(Stop("too late, if it comes to that"))

    life.send = done  # type: ignore[method-assign]
    assert life.loop.run() == EXIT_TEMPORARY
    assert life.store.meta(MAIN) is not None
    life.close()


def test_a_device_that_computes_nothing_any_more_ends_the_loop(life: Life) -> None:
    def poisoned(batch: object) -> None:
        raise Internal("decode_failed", "poisoned")

    life.engine.faults.decode = poisoned
    life.welcome()
    life.load()
    for name in ("main", "side"):
        life.command(
            Run,
            job=1,
            conversation=ConversationKey("local", "coder", name),
            prompt="abc",
            version=0,
            transcript_tokens=0,
        )
    assert life.loop.run() == 75
    assert len(life.of(Failed)) == 1, "the last one is left to the next process"


def test_nobody_is_told_what_is_where_while_it_is_moved(tmp_path: Path) -> None:
    life = Life(tmp_path / "arenas", threads=True)
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: str) -> None:
        begun.set()
        assert go_on.wait(20)

    life.engine.faults.load = slow
    life.welcome()
    load = life.load()
    thread = threading.Thread(target=life.loop.run)
    thread.start()
    assert begun.wait(20)
    before = len(life.of(Residency))
    life.inbox.put(ReadyWanted())
    taken = life.command(Budget, budget_bytes=1 << 20)
    # Both are in, and neither is answered; the loop sleeps.
    deadline = time.monotonic() + 20
    while not life.inbox.empty():
        assert time.monotonic() < deadline
    assert not life.of(Ready)
    assert not life.of(WorkerOk)
    assert len(life.of(Residency)) == before
    go_on.set()
    life.leave_after = Ready
    thread.join(20)
    assert not thread.is_alive()
    assert [found.op for found in life.of(Loaded)] == [load]
    assert taken in [found.op for found in life.of(WorkerOk)]
    assert life.of(Ready)[0].memory.own_bytes > 0
    assert len(life.of(Residency)) > before
    life.close()


def test_another_ready_tells_the_base_that_has_grown(tmp_path: Path) -> None:
    life = Life(tmp_path)
    assert life.loop.ready().base_bytes == 0
    life.loop._core.residency.base_bytes += 5
    assert life.loop.ready().base_bytes == 5
