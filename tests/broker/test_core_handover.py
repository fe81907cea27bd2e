"""DRAIN_DEVICE in the core: a worker leaves, what waits goes on with the next one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_worker import MIB, Bench, Client, FakeModel, ScriptedWorker, config_of

from vram_conductor.broker.events import WorkerBad
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.drain import DrainReceipt
from vram_conductor.protocol.errors import Code, Unimplemented
from vram_conductor.protocol.status import AgentStatus


def setup(*agents: str, **broker: Any) -> tuple[Bench, ScriptedWorker, Client]:
    bench = Bench(config_of(**broker))
    worker = bench.worker()
    client = bench.client()
    client.role = "admin"
    for agent in agents or ("coder",):
        client.ok(client.register(agent))
    return bench, worker, client


def receipt(client: Client, rid: bytes) -> DrainReceipt:
    return msgspec.convert(client.ok(rid), DrainReceipt)


def leave(worker: ScriptedWorker) -> None:
    worker.dead = True
    worker.say(c.WorkerBye(worker_epoch=worker.epoch))


def agent(bench: Bench, name: str = "coder") -> AgentStatus:
    return next(a for a in bench.core.report(bench.now_ns).agents if a.agent == name)


def waits(bench: Bench) -> list[str]:
    return [job.waiting for job in bench.core.report(bench.now_ns).jobs]


# --- the way ------------------------------------------------------------------------------------


def test_what_runs_is_finished_and_what_waits_goes_on_with_the_next_worker() -> None:
    bench, old, client = setup()
    running, behind = client.decode("coder"), client.decode("coder")
    old.start(old.job("coder"))
    rid = client.drain(drain_ms=5_000)
    assert client.got(rid, m.Progress)[0].stage == "drain"
    assert old.waiting(c.Drain).drain_ms == 5_000
    late, more = client.decode("coder", conversation="side"), client.register("more")
    assert len(old.all(c.Run)) == 1, "a worker that leaves gets nothing new"
    assert waits(bench) == ["", "worker", "worker"]
    bench.advance(1_000)
    old.finish(old.job("coder"), "to the end")
    assert client.text(running) == "to the end"
    client.done(running)
    assert client.silent(rid)
    old.answer(old.waiting(c.Drain))
    assert client.silent(rid), "it is over when the worker has left"
    leave(old)
    found = receipt(client, rid)
    assert (found.pid, found.worker_epoch, found.build) == (1001, 1, "fake")
    assert (found.finished, found.cut_off, found.waiting) == (1, 0, 2)
    assert found.ms == 1_000
    bench.advance(60_000)
    new = bench.worker(epoch=2)
    client.ok(more)
    assert new.job("coder").transcript == [1, 2, 3, 7, 8], "the record is what it was"
    for conversation, waiting in (("main", behind), ("side", late)):
        new.finish(new.job("coder", conversation))
        client.done(waiting)


def test_an_answer_that_is_not_over_in_time_keeps_its_tokens_and_is_counted() -> None:
    _bench, worker, client = setup()
    seen, unseen = client.decode("coder"), client.decode("coder", conversation="side")
    worker.start(worker.job("coder"), [1])
    worker.tokens(worker.job("coder"), "a", [10])
    rid = client.drain(drain_ms=0)
    for conversation in ("side", "main"):
        run = worker.job("coder", conversation).run
        worker.fail(run, Code.UNAVAILABLE, "worker_draining")
    error = client.error(seen)
    assert (error.reason, error.details["generated_tokens"]) == ("worker_left", 1)
    leave(worker)
    found = receipt(client, rid)
    assert (found.finished, found.cut_off, found.waiting) == (0, 1, 1)
    assert client.silent(unseen)


def test_the_same_request_again_has_the_same_answer_and_sends_nobody_away() -> None:
    bench, old, client = setup()
    rid = client.drain()
    other = bench.client("c2")
    other.role = "admin"
    joined = other.drain(drain_ms=1)
    assert [drain.drain_ms for drain in old.all(c.Drain)] == [10_000, 1]
    leave(old)
    first = receipt(client, rid)
    assert receipt(other, joined) == first
    new = bench.worker(epoch=2)
    client.drain(rid=rid)
    assert [answer.body for answer in client.got(rid, m.Ok)] == [client.got(rid, m.Ok)[0].body] * 2
    assert not new.all(c.Drain)
    stale = client.error(client.drain(worker_epoch=1))
    assert (stale.code, stale.reason, stale.details["pid"]) == (
        Code.ABORTED,
        "worker_replaced",
        1002,
    )
    assert "build fake" in stale.message
    assert not new.all(c.Drain)
    meant = client.drain(worker_epoch=2)
    leave(new)
    assert receipt(client, meant).pid == 1002


def test_who_may_drain_and_what() -> None:
    bench, worker, client = setup()
    client.role = "owner"
    assert client.error(client.drain()).reason == "role_denied"
    client.role = "observer"
    assert client.error(client.drain()).reason == "role_denied"
    client.role = "admin"
    assert client.error(client.drain("cuda:9")).reason == "no_such_device"
    assert client.error(client.drain(drain_ms=-1)).reason == "bad_value"
    assert not worker.all(c.Drain)
    leave(worker)
    error = client.error(client.drain())
    assert error.reason == "no_worker"
    assert "pid 1001 on box, was stopped 0 s ago" in error.message
    bench.shut_down()


def test_a_worker_that_dies_instead_is_said() -> None:
    bench, worker, client = setup()
    rid = client.drain()
    bench.kill(worker)
    assert client.error(rid).reason == "worker_lost"
    bench.worker(epoch=2)
    assert agent(bench).state == "ready"


def test_a_worker_that_does_not_leave_is_said() -> None:
    bench, worker, client = setup()
    rid = client.drain(drain_ms=1_000)
    bench.advance(122_000, step_ms=1_000)
    error = client.error(rid)
    assert (error.reason, error.details["pid"]) == ("worker_timeout", 1001)
    assert "given up" in error.message
    said = next(line for line in bench.logs if line.event == "worker_given_up")
    assert (said.fields["device"], said.fields["pid"]) == ("cpu", 1001)
    # What waits is not lost with it.
    waiting = client.decode("coder")
    assert not worker.all(c.Run)
    new = bench.worker(epoch=2)
    new.finish(new.job("coder"))
    client.done(waiting)


@pytest.mark.parametrize("answered", [False, True])
def test_a_worker_that_does_not_leave_counts_as_dead_though_it_pings(answered: bool) -> None:
    bench, old, client = setup("coder", "writer")
    seen, unseen = client.decode("coder"), client.decode("writer")
    old.start(old.job("coder"), [1])
    old.tokens(old.job("coder"), "a", [10])
    rid = client.drain(drain_ms=1_000, hold_ms=0)
    if answered:
        old.answer(old.waiting(c.Drain))
    bench.advance(120_000, step_ms=1_000)
    assert [client.silent(each) for each in (rid, seen, unseen)] == [True] * 3
    bench.advance(2_000, step_ms=1_000)
    assert client.error(rid).reason == "worker_timeout"
    error = client.error(seen)
    assert (error.reason, error.details["generated_tokens"]) == ("worker_lost", 1)
    assert old.refused is not None
    assert old.refused.reason == "stale_worker"
    # Nothing that it says counts any more, and a new READY of it neither.
    old.finish(old.job("writer"), "late")
    old.refused = None
    old.ready()
    assert old.refused is not None
    assert old.refused.reason == "stale_worker"
    assert (client.text(unseen), client.silent(unseen)) == ("", True)
    status = bench.core.report(bench.now_ns).devices[0]
    assert (status.worker, status.away) == (None, "lost")
    new = bench.worker(epoch=2)
    assert new.welcome is not None
    new.finish(new.job("writer"))
    client.done(unseen)
    old.refused = None
    old.ready()
    assert old.refused is not None


def test_what_waits_for_one_that_does_not_leave_ends_in_time() -> None:
    bench, _old, client = setup()
    client.drain(drain_ms=0, hold_ms=0)
    waiting = client.decode("coder")
    bench.advance(149_000, step_ms=1_000)
    assert client.silent(waiting)
    bench.advance(2_000, step_ms=1_000)
    assert client.error(waiting).reason == "no_worker"


def test_a_successor_that_waits_takes_over_from_one_that_does_not_leave() -> None:
    bench, _old, client = setup()
    client.drain(drain_ms=60_000)
    new = bench.worker(epoch=2)
    client.drain(drain_ms=0)
    waiting = client.decode("coder")
    bench.advance(119_000, step_ms=1_000)
    assert (new.welcome, new.refused) == (None, None)
    bench.advance(2_000, step_ms=1_000)
    assert new.welcome is not None
    new.finish(new.job("coder"))
    client.done(waiting)


def test_whoever_asked_may_leave() -> None:
    bench, worker, client = setup()
    client.drain()
    client.gone(dead=True)
    leave(worker)
    bench.worker(epoch=2)
    assert agent(bench).state == "ready"


# --- how long is waited -------------------------------------------------------------------------


def test_requests_wait_for_the_next_worker_as_long_as_was_asked() -> None:
    bench, worker, client = setup()
    client.drain(hold_ms=90_000)
    early = client.decode("coder")
    leave(worker)
    bench.advance(60_000, step_ms=2_000)
    status = bench.core.report(bench.now_ns).devices[0]
    assert (status.away, status.absent_ms, status.patience_ms) == ("stopped", 60_000, 30_000)
    late, more = client.decode("coder", conversation="late"), client.register("more")
    assert [client.silent(rid) for rid in (early, late, more)] == [True] * 3
    bench.advance(28_000, step_ms=2_000)
    assert [client.silent(rid) for rid in (early, late, more)] == [True] * 3
    bench.advance(4_000, step_ms=2_000)
    assert {client.error(rid).reason for rid in (early, late, more)} == {"no_worker"}
    error = client.error(client.decode("coder"))
    assert error.reason == "no_worker"
    assert "was stopped 92 s ago" in error.message


def test_a_short_hold_is_no_shorter_than_for_any_other_worker() -> None:
    bench, worker, client = setup()
    client.drain(hold_ms=0)
    waiting = client.decode("coder")
    leave(worker)
    bench.advance(28_000, step_ms=2_000)
    assert client.silent(waiting)
    bench.advance(4_000, step_ms=2_000)
    assert client.error(waiting).reason == "no_worker"


def test_the_next_worker_ends_the_hold() -> None:
    bench, worker, client = setup()
    client.drain(hold_ms=600_000)
    leave(worker)
    bench.kill(bench.worker(epoch=2))
    waiting = client.decode("coder")
    bench.advance(32_000, step_ms=2_000)
    error = client.error(waiting)
    assert error.reason == "no_worker"
    assert "pid 1002 on box, was lost 3" in error.message


# --- what meets a worker that leaves ------------------------------------------------------------


def test_an_agent_on_its_way_back_waits_with_its_jobs() -> None:
    bench, worker, client = setup()
    bench.kill(worker)
    second = bench.worker(epoch=2, ready=False)
    second.auto -= {c.Load}
    second.ready()
    waiting = client.decode("coder")
    before = bench.core.report(bench.now_ns).devices[0].promised
    client.drain()
    second.fail(second.waiting(c.Load), Code.UNAVAILABLE, "worker_draining")
    assert agent(bench).state == "waiting"
    assert bench.core.report(bench.now_ns).devices[0].promised == before
    leave(second)
    third = bench.worker(epoch=3)
    third.finish(third.job("coder"))
    client.done(waiting)


@pytest.mark.parametrize("where", ["estimate", "load"])
def test_a_registration_under_way_is_done_by_the_next_worker(where: str) -> None:
    bench, worker, client = setup()
    worker.auto -= {c.Estimate, c.Load}
    rid = client.register("more", "other")
    if where == "load":
        worker.answer(worker.waiting(c.Estimate))
    client.drain()
    if where == "estimate":
        worker.answer(worker.waiting(c.Estimate))
    worker.fail(worker.waiting(c.Load), Code.UNAVAILABLE, "worker_draining")
    assert client.silent(rid)
    leave(worker)
    bench.worker(epoch=2)
    client.ok(rid)


def test_a_registration_that_has_to_ask_again_waits_for_the_next_worker() -> None:
    bench, worker, client = setup()
    worker.auto -= {c.Estimate}
    rid = client.register("more", n_ctx=2048)
    first = worker.waiting(c.Estimate)
    worker.auto.add(c.Estimate)
    # The pool becomes another one meanwhile, so the answer is of no use.
    client.ok(client.unregister("coder"))
    client.ok(client.register("wide", n_ctx=4096))
    client.drain()
    worker.answer(first)
    assert client.silent(rid), client.got(rid)
    leave(worker)
    bench.worker(epoch=2)
    client.ok(rid)


def test_a_suspended_agent_is_asked_about_with_the_next_worker() -> None:
    bench, worker, client = setup()
    bench.kill(worker)
    second = bench.worker(epoch=2, ready=False)
    second.auto -= {c.Load}
    second.ready()
    second.fail(second.waiting(c.Load), Code.INTERNAL, "load_failed", "bad sector")
    assert agent(bench).state == "suspended"
    client.drain()
    rid = client.register("coder")
    assert client.silent(rid)
    leave(second)
    bench.worker(epoch=3)
    assert client.ok(rid)["state"] == "ready"


# --- two workers --------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [2, 0], ids=["younger", "its clock is behind"])
def test_a_successor_that_comes_early_waits_until_the_first_has_left(epoch: int) -> None:
    bench, old, client = setup()
    running = client.decode("coder")
    old.start(old.job("coder"))
    client.drain(drain_ms=60_000)
    new = bench.worker(epoch=epoch, peer=b"successor")
    bench.advance(20_000)
    assert (new.welcome, new.refused) == (None, None)
    old.finish(old.job("coder"))
    client.done(running)
    leave(old)
    assert new.welcome is not None
    client.ok(client.register("more"))


def test_a_successor_that_waits_takes_over_from_one_that_hangs() -> None:
    bench, old, client = setup()
    client.drain(drain_ms=60_000)
    new = bench.worker(epoch=2)
    old.dead = True
    bench.advance(14_000, alive=False)
    assert new.welcome is not None


# --- versions -----------------------------------------------------------------------------------


def test_a_worker_of_another_protocol_is_told_both_versions() -> None:
    bench, worker, client = setup()
    stranger = bench.worker(epoch=2, ready=False)
    error = Unimplemented("unsupported_version", "theirs 2, ours 1", theirs=2, ours=1)
    bench.post(WorkerBad(stranger.peer, error))
    assert stranger.refused is not None
    assert (stranger.refused.details["theirs"], stranger.refused.details["ours"]) == (2, 1)
    said = bench.logs[-1]
    assert (said.event, said.fields["theirs"], said.fields["ours"]) == ("worker_refused", 2, 1)
    rid = client.decode("coder")
    worker.finish(worker.job("coder"))
    client.done(rid)


def test_another_build_is_taken_said_and_asked_anew() -> None:
    bench, old, client = setup("coder", "writer")
    before = bench.core.report(bench.now_ns).devices[0].promised
    client.drain()
    waiting = client.decode("coder")
    leave(old)
    new = bench.worker(epoch=2, ready=False)
    new.ready(build="faker", version="0.2.0")
    changed = next(line for line in bench.logs if line.event == "worker_build_changed")
    assert (changed.fields["was"], changed.fields["now"]) == ("fake", "faker")
    assert len(new.all(c.Estimate)) >= 2, "what agents take with it has to be asked"
    assert bench.core.report(bench.now_ns).devices[0].promised == before
    assert {agent(bench, name).state for name in ("coder", "writer")} == {"ready"}
    new.finish(new.job("coder"))
    client.done(waiting)
    bench.logs.clear()
    leave(new)
    newer = bench.worker(epoch=3, ready=False)
    newer.ready(build="faker")
    assert not any(line.event == "worker_build_changed" for line in bench.logs)
    assert not newer.all(c.Estimate)


def test_a_worker_of_another_version_of_the_program_is_taken_and_said() -> None:
    bench = Bench(version="0.1.0")
    worker = bench.worker(ready=False)
    worker.ready(version="0.2.0")
    said = [line.fields for line in bench.logs if line.event == "worker_of_another_version"]
    assert [(fields["worker"], fields["broker"]) for fields in said] == [("0.2.0", "0.1.0")]
    assert worker.welcome is not None
    bench.kill(worker)
    bench.logs.clear()
    bench.worker(epoch=2)
    assert not any(line.event == "worker_of_another_version" for line in bench.logs)


@pytest.mark.parametrize(
    ("builds", "taken"),
    [
        ([], True),
        (["lib-1.2"], True),
        (["lib-1.1", "lib-1.2+abc"], True),
        (["lib-1.2+abd"], False),
        (["lib-1"], False),
        (["lib-1.1", "lib-1.3"], False),
    ],
)
def test_only_configured_builds_are_taken(builds: list[str], taken: bool) -> None:
    bench = Bench(config_of(builds=builds))
    worker = bench.worker(ready=False)
    worker.ready(build="lib-1.2+abc")
    assert (worker.welcome is not None) == taken
    if not taken:
        assert worker.refused is not None
        error = worker.refused
        assert (error.reason, error.details["theirs"]) == ("unsupported_build", "lib-1.2+abc")
        assert error.details["ours"] == builds
        assert all(build in error.message for build in ["lib-1.2+abc", *builds])


def test_agents_that_do_not_fit_with_another_build_are_suspended_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, old, client = setup("coder")
    client.ok(client.register("writer", "other"))
    client.drain()
    leave(old)
    plain = FakeModel.pool_bytes

    def hungry(model: FakeModel, cells: int) -> int:
        return plain(model, cells) * (60 if model.model == "m-other" else 1)

    monkeypatch.setattr(FakeModel, "pool_bytes", hungry)
    new = bench.worker(epoch=2, ready=False)
    new.ready(build="hungry")
    assert agent(bench).state == "ready"
    reason = agent(bench, "writer").reason
    assert reason is not None
    assert reason.details["short_by_bytes"] > 0
    promised = bench.core.report(bench.now_ns).devices[0].promised
    assert promised.promised_bytes <= 1024 * MIB
