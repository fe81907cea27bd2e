"""A worker's session and the broker's core, with a wire between them that loses what is on it.

The worker's side is the real session and backlog, the broker's the real core; clock, wire and
engine are the test's. Whatever the wire does, every command arrives once and every piece of text is
seen once, as long as each cut heals in time.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import Bench, Client, Job, ScriptedWorker, config_of

from vram_conductor.broker.events import ClientMessageIn, WorkerGone, WorkerMessageIn
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.resume import FEATURE
from vram_conductor.worker.backlog import Backlog
from vram_conductor.worker.session import Session, Verdict

Wired = tuple[Any, list[bytes]]
BEFORE_SILENCE_MS = limits.HEARTBEAT_MS * limits.MISSED_HEARTBEATS_MAX


class WiredWorker(ScriptedWorker):
    """A scripted worker behind the worker's own session and backlog.

    Attributes:
        up, down: what is on the wire.
        commands: ops of the commands that reached the engine, in order.
    """

    def __init__(self, bench: Bench, *, epoch: int = 1) -> None:
        super().__init__(bench, epoch=epoch)
        self.session = Session(bench.now_ns)
        self.backlog = Backlog()
        self.up: deque[Wired] = deque()
        self.down: deque[Wired] = deque()
        self.connected = True
        self.connections = 1
        self.commands: list[int] = []
        self.lost_sessions = 0
        bench.workers[self.peer] = self
        self.ready(features=[FEATURE])
        self.settle()

    # --- the engine's side ---

    def say(self, message: Any, raw: Any = ()) -> None:
        if self.session.may_send(message):
            self.backlog.push(message, list(raw))
            self.flush()

    def flush(self, most: int = 1 << 30) -> None:
        """Hand messages to the wire, as the link does."""
        while (
            most > 0
            and self.connected
            and not self.session.is_held
            and (entry := self.backlog.first()) is not None
        ):
            assert entry.message is not None
            if isinstance(entry.message, c.Ready):
                self.session.said_ready(entry.message, self.bench.now_ns)
            self.up.append((entry.message, entry.raw))
            self.backlog.drop_first(sent=True)
            most -= 1

    # --- the wire ---

    def receive(self, message: Any, raw: list[bytes]) -> None:
        self.down.append((message, raw))

    def carry_up(self, most: int = 1 << 30) -> None:
        """Let the broker have the oldest of what is on its way."""
        while self.up and most > 0:
            message, raw = self.up.popleft()
            self.bench.post(WorkerMessageIn(self.peer, message, raw))
            most -= 1

    def carry_down(self, most: int = 1 << 30) -> None:
        while self.down and most > 0:
            self._judge(*self.down.popleft())
            most -= 1

    def _judge(self, message: Any, raw: list[bytes]) -> None:
        match self.session.receive(message, self.bench.now_ns):
            case Verdict.OPENED:
                self.backlog.begin(numbered=self.session.resume_ms > 0)
                super().receive(message, raw)
            case Verdict.RESUMED:
                self.backlog.rewind(message.order)
                self.flush()
            case Verdict.HAND:
                self.commands.append(message.op)
                super().receive(message, raw)
            case Verdict.LOST:
                self.lost_sessions += 1
                self.backlog.clear()
            case _:
                if isinstance(message, c.WorkerPong):
                    self.backlog.confirm(message.order)

    def settle(self) -> None:
        """Let everything arrive."""
        while self.up or self.down:
            self.carry_up()
            self.carry_down()

    def cut(self, *, noticed: bool = True) -> None:
        """The wire breaks: what is on it is gone. The broker notices now, or never."""
        self.up.clear()
        self.down.clear()
        self.connected = False
        self.dead = True  # the bench delivers nothing to it
        if noticed:
            self.bench.gone_workers.add(self.peer)
            self.bench.post(WorkerGone(self.peer))
        self.session.hold(self.bench.now_ns)

    def heal(self) -> None:
        """Another connection."""
        self.connections += 1
        del self.bench.workers[self.peer]
        self.peer = f"w-{self.epoch}-{self.connections}".encode()
        self.bench.workers[self.peer] = self
        self.connected, self.dead = True, False
        if self.session.resume_due(self.bench.now_ns):
            self.ask()

    def ask(self) -> None:
        """W_RESUME."""
        self.up.append((self.session.resume(self.bench.now_ns), []))

    def beat(self) -> None:
        """W_PING, if it can leave."""
        if self.session.is_open and not self.session.is_held:
            self.say(c.WorkerPing(n=self.session.next_n(), steps=0, op=self.session.op))


def scene(*agents: str, **broker: Any) -> tuple[Bench, WiredWorker, Client]:
    bench = Bench(config_of(**broker))
    worker = WiredWorker(bench)
    client = bench.client()
    for agent in agents:
        rid = client.register(agent)
        worker.settle()
        client.ok(rid)
    return bench, worker, client


def pass_time(bench: Bench, client: Client, ms: int) -> None:
    """The client stays; the worker says nothing."""
    while ms > 0:
        bench.advance(min(ms, 500), alive=False)
        bench.post(ClientMessageIn(client.peer, "local", same_user_ipc=True, message=m.Ping()))
        ms -= 500


def logged(bench: Bench, event: str) -> int:
    return sum(line.event == event for line in bench.logs)


def test_a_cut_in_the_middle_costs_neither_job_nor_token() -> None:
    bench, worker, client = scene("coder", "other")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "one ", [1])
    worker.settle()
    worker.tokens(job, "two ", [2])  # lost on the way
    waiting = client.decode("other", continue_=True)  # its RUN is lost on the way
    worker.cut()
    worker.tokens(job, "three", [3])
    pass_time(bench, client, limits.RESUME_MS - 500)
    assert client.silent(rid)
    status = bench.core.report(bench.now_ns).devices[0].worker
    assert status is not None
    assert status.away_ms == 500
    worker.heal()
    worker.settle()
    worker.done(job)
    worker.finish(worker.job("other"), "else")
    worker.settle()
    assert client.text(rid) == "one two three"
    assert client.done(rid).generated_tokens == 3
    assert client.text(waiting) == "else"
    assert (logged(bench, "worker_away"), logged(bench, "worker_back")) == (1, 1)
    assert not logged(bench, "worker_lost")


def test_no_run_is_sent_to_a_worker_that_is_away() -> None:
    bench, worker, client = scene("coder")
    worker.cut()
    rid = client.decode("coder", continue_=True)
    pass_time(bench, client, 3_000)
    link = bench.core._state.devices["cpu"].link
    assert link is not None
    assert not link.runs
    worker.heal()
    worker.settle()
    worker.finish(worker.job("coder"), "late")
    worker.settle()
    assert client.text(rid) == "late"


def test_a_cut_that_does_not_heal_in_time_ends_as_a_lost_worker() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "seen", [1])
    worker.settle()
    worker.cut()
    pass_time(bench, client, limits.RESUME_MS + 500)
    assert client.error(rid).reason == "worker_lost"
    worker.heal()
    worker.settle()
    assert worker.lost_sessions == 1, "W_NO_SESSION: it has to say READY"
    worker.ready(features=[FEATURE])
    worker.settle()
    assert worker.welcome is not None
    again = client.decode("coder", continue_=True)
    worker.settle()
    worker.finish(worker.job("coder"), "next")
    worker.settle()
    assert client.text(again) == "next"


def test_a_silence_that_ends_on_the_same_connection_costs_nothing() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.settle()
    worker.tokens(job, "held up", [1])  # stays on the wire
    pass_time(bench, client, BEFORE_SILENCE_MS + 2_000)
    assert logged(bench, "worker_away") == 1
    worker.settle()
    worker.done(job)
    worker.settle()
    assert client.text(rid) == "held up"
    assert logged(bench, "worker_back") == 1


def test_a_silent_worker_that_comes_over_another_connection_goes_on() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [1])
    worker.cut(noticed=False)
    pass_time(bench, client, BEFORE_SILENCE_MS)
    worker.heal()
    worker.settle()
    worker.tokens(job, "b", [2])
    worker.done(job)
    worker.settle()
    assert client.text(rid) == "ab"
    assert client.done(rid).generated_tokens == 2


@pytest.mark.parametrize("change", [{"worker_epoch": 2}, {"broker_epoch": 99}, {"device": "gpu"}])
def test_another_session_is_not_resumed(change: dict[str, Any]) -> None:
    bench, worker, _client = scene("coder")
    worker.cut()
    ask: dict[str, Any] = {"device": "cpu", "broker_epoch": 100, "worker_epoch": 1, "op": 0}
    stranger = ScriptedWorker(bench, peer=b"stranger")
    bench.workers[b"stranger"] = stranger
    stranger.say(c.Resume(**ask | change))
    assert stranger.received == [c.NoSession()]


def test_a_worker_with_another_key_is_not_given_the_session() -> None:
    bench, worker, _client = scene("coder")
    worker.cut()
    thief = ScriptedWorker(bench, peer=b"thief")
    bench.workers[b"thief"] = thief
    ask = c.Resume(device="cpu", broker_epoch=100, worker_epoch=1, op=0)
    bench.post(WorkerMessageIn(b"thief", ask, [], key="another"))
    assert thief.received == [c.NoSession()]


def test_a_process_that_has_ended_is_not_waited_for() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    worker.start(worker.job("coder"))
    worker.tokens(worker.job("coder"), "x", [1])
    worker.settle()
    bench.gone_workers.add(worker.peer)
    worker.dead = True
    bench.post(WorkerGone(worker.peer, dead=True))
    assert client.error(rid).reason == "worker_lost"


def test_a_successor_on_the_same_host_is_welcomed_at_once() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    worker.cut()
    successor = WiredWorker(bench, epoch=2)
    assert successor.welcome is not None
    successor.finish(successor.job("coder"), "again")
    successor.settle()
    assert client.text(rid) == "again"


def test_a_second_worker_on_another_host_does_not_steal_the_device() -> None:
    bench, worker, _client = scene("coder")
    worker.cut()
    second = ScriptedWorker(bench, epoch=2)
    bench.workers[second.peer] = second
    second.ready(host="elsewhere")
    assert second.welcome is None
    worker.heal()
    worker.settle()
    bench.advance(limits.HEARTBEAT_MS, alive=False)
    worker.beat()
    worker.settle()
    assert second.refused is not None
    assert second.refused.reason == "device_taken"


def test_of_two_successors_only_the_one_that_gets_the_device_is_welcomed() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    worker.cut()
    elsewhere = ScriptedWorker(bench, epoch=3)
    bench.workers[elsewhere.peer] = elsewhere
    elsewhere.ready(host="elsewhere")
    successor = WiredWorker(bench, epoch=2)
    assert elsewhere.welcome is None
    assert elsewhere.refused is not None
    assert elsewhere.refused.reason == "stale_worker"
    successor.finish(successor.job("coder"), "once")
    successor.settle()
    assert client.text(rid) == "once"


def test_where_the_broker_holds_nothing_a_cut_ends_the_session() -> None:
    _bench, worker, client = scene("coder", resume_ms=0)
    rid = client.decode("coder", continue_=True)
    worker.settle()
    worker.start(worker.job("coder"))
    worker.tokens(worker.job("coder"), "x", [1])
    worker.settle()
    worker.cut()
    assert client.error(rid).reason == "worker_lost"
    assert not worker.session.is_held


def test_a_cancel_of_the_time_without_a_connection_arrives() -> None:
    bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "x", [1])
    worker.settle()
    worker.cut()
    client.send(m.Cancel(rid=rid))
    pass_time(bench, client, 1_000)
    worker.heal()
    worker.settle()
    assert worker.cancelled() == [job.run.op]


def test_what_is_kept_for_the_other_end_is_bounded_by_the_heartbeats() -> None:
    bench, worker, client = scene("coder")
    client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    link = bench.core._state.devices["cpu"].link
    assert link is not None
    for index in range(2_000):
        worker.tokens(job, "x", [index])
        worker.settle()
        assert len(worker.backlog._unconfirmed) <= 256
    worker.beat()
    worker.settle()
    assert len(worker.backlog._unconfirmed) == 0
    assert len(link.unconfirmed) == 0


def test_nothing_is_kept_for_a_worker_that_numbers_nothing() -> None:
    bench = Bench(config_of())
    worker = ScriptedWorker(bench)
    bench.workers[worker.peer] = worker
    worker.ready(features=[FEATURE])
    client = bench.client()
    client.ok(client.register("coder"))
    link = bench.core._state.devices["cpu"].link
    assert link is not None
    for _ in range(20):
        rid = client.decode("coder")
        worker.finish(worker.job("coder"))
        client.done(rid)
        worker.residency()
        assert len(link.unconfirmed) <= 2


def test_what_comes_twice_counts_once() -> None:
    _bench, worker, client = scene("coder")
    rid = client.decode("coder", continue_=True)
    worker.settle()
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "once", [1])
    twice = list(worker.up)
    worker.settle()
    worker.up.extend(twice)
    worker.settle()
    worker.done(job)
    worker.settle()
    assert client.text(rid) == "once"
    assert client.done(rid).generated_tokens == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2)),
        st.tuples(st.just("work"), st.integers(0, 5)),
        st.tuples(st.just("up"), st.integers(1, 4)),
        st.tuples(st.just("down"), st.integers(1, 4)),
        st.tuples(st.just("beat"), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 1_500)),
        st.tuples(st.just("cut"), st.booleans()),
        st.tuples(st.just("heal"), st.just(0)),
        st.tuples(st.just("again"), st.just(0)),
    ),
    min_size=5,
    max_size=80,
)


def work(worker: WiredWorker, said: dict[int, str], choice: int) -> None:
    """One step of one of the jobs at the worker."""
    jobs: list[Job] = list(worker.jobs.values())
    if not jobs:
        return
    job = jobs[choice % len(jobs)]
    if not job.started:
        worker.start(job)
    elif len(job.generated) < 4:
        text = f"{job.run.job}.{len(job.generated)} "
        said[job.run.job] = said.get(job.run.job, "") + text
        worker.tokens(job, text, [len(job.generated)])
    else:
        worker.done(job)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_whatever_the_wire_does_everything_arrives_once_and_in_order(
    steps: list[tuple[str, int]],
) -> None:
    agents = ["a", "b", "c"]
    bench, worker, client = scene(*agents)
    said: dict[int, str] = {}
    rids: list[bytes] = []
    away_ms = 0
    for what, value in steps:
        match what:
            case "ask":
                rids.append(client.decode(agents[value], continue_=True))
            case "work":
                work(worker, said, value)
            case "up":
                worker.carry_up(value)
            case "down":
                worker.carry_down(value)
            case "beat":
                worker.beat()
            case "wait" if away_ms + value < limits.RESUME_MS - 1_000:
                away_ms += value
                pass_time(bench, client, value)
            case "cut" if worker.connected:
                worker.cut(noticed=bool(value))
            case "heal" if not worker.connected:
                worker.heal()
                away_ms = 0
            case "again" if worker.connected and worker.session.is_held:
                worker.ask()
            case _:
                pass  # not now
    if not worker.connected:
        worker.heal()
    worker.settle()
    while not all(client.got(rid, m.Done) for rid in rids):
        assert worker.jobs, "everything has arrived, and somebody still waits"
        work(worker, said, 0)
        worker.settle()
    assert worker.lost_sessions == 0
    assert worker.commands == sorted(set(worker.commands)), "each command once, in order"
    for rid in rids:
        (accepted, *_) = client.got(rid, m.Accepted)
        assert client.text(rid) == said[accepted.job]
        assert client.done(rid).generated_tokens == 4
