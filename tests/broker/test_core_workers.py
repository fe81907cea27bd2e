"""Workers in the core: fencing, loss, restart, two for one device, broker restart, drain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_worker import MIB, MODELS, MS, Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.drain import CUT_OFF_MS
from vram_conductor.broker.events import WorkerBad
from vram_conductor.broker.journal.records import (
    AgentRegistered,
    ConversationCommitted,
    WorkerEpochSeen,
)
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.conversations import Turn
from vram_conductor.protocol.errors import LEDGER_DENY, Code, InvalidArgument
from vram_conductor.protocol.status import AgentStatus, DeviceStatus
from vram_conductor.protocol.tokens import pack_tokens
from vram_conductor.protocol.values import ConversationKey, Line, Memory, PoolShape

MAIN = ConversationKey("local", "coder", "main")


def setup(*agents: str, **broker: Any) -> tuple[Bench, ScriptedWorker, Client]:
    bench = Bench(config_of(**broker))
    worker = bench.worker()
    client = bench.client()
    for agent in agents or ("coder",):
        client.ok(client.register(agent))
    return bench, worker, client


def agent(bench: Bench, name: str = "coder") -> AgentStatus:
    return next(a for a in bench.core.report(bench.now_ns).agents if a.agent == name)


def device(bench: Bench) -> DeviceStatus:
    return bench.core.report(bench.now_ns).devices[0]


def run_once(worker: ScriptedWorker, client: Client, name: str = "coder") -> None:
    rid = client.decode(name, continue_=True)
    worker.finish(worker.job(name))
    client.done(rid)


# --- READY ------------------------------------------------------------------------------------


def test_ready_is_welcomed_with_the_budget_and_what_is_known() -> None:
    bench = Bench()
    worker = bench.worker(base_bytes=10 * MIB)
    assert worker.welcome is not None
    assert worker.welcome.broker_epoch == 100
    assert worker.welcome.conversations == []
    assert worker.all(c.Budget)[0].budget_bytes == 1024 * MIB
    assert WorkerEpochSeen(device="cpu", worker_epoch=1) in bench.records
    status = device(bench)
    assert status.promised.promised_bytes == 10 * MIB
    assert status.worker is not None
    assert status.worker.worker_epoch == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"v": (2, 0)}, "unsupported_version"),
        ({"base_bytes": -1}, "bad_bytes"),
        ({"host_total_bytes": -1}, "bad_bytes"),
    ],
)
def test_unacceptable_worker_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    bench = Bench()
    worker = bench.worker(ready=False)
    worker.ready(**changes)
    assert worker.refused is not None
    assert worker.refused.reason == reason
    assert worker.welcome is None


def test_worker_of_an_unknown_or_another_kind_of_device_is_refused() -> None:
    bench = Bench()
    stray = bench.worker("cuda:3", kind="cuda")
    assert stray.refused is not None
    assert stray.refused.reason == "no_such_device"
    wrong = bench.worker("cpu", kind="cuda", epoch=2)
    assert wrong.refused is not None
    assert wrong.refused.reason == "wrong_device_kind"


def test_any_device_is_taken_where_none_is_configured() -> None:
    bench = Bench(msgspec.structs.replace(config_of(), device=[]))
    bench.worker("cuda:0", kind="cuda")
    client = bench.client()
    assert client.ok(client.register("coder"))["device"] == "cuda:0"


@pytest.mark.parametrize("changes", [{"base_bytes": -5}, {"v": (2, 0)}])
def test_a_refused_worker_brings_no_device(changes: dict[str, Any]) -> None:
    bench = Bench(msgspec.structs.replace(config_of(), device=[]))
    worker = bench.worker("cud:0", ready=False)
    worker.ready(**changes)
    assert worker.refused is not None
    assert bench.core.report(bench.now_ns).devices == []
    worker.ready()
    assert [item.device for item in bench.core.report(bench.now_ns).devices] == ["cud:0"]


def test_workers_do_not_bring_devices_without_end() -> None:
    bench = Bench(msgspec.structs.replace(config_of(), device=[]))
    for number in range(limits.DEVICES_MAX):
        assert bench.worker(f"gpu{number}", epoch=number + 1).welcome is not None
    one_more = bench.worker("one-more")
    assert one_more.refused is not None
    assert one_more.refused.reason == "no_such_device"
    assert len(bench.core.report(bench.now_ns).devices) == limits.DEVICES_MAX
    again = bench.worker("gpu7", epoch=1000, peer=b"again")
    bench.advance(7_000, alive=False)
    assert again.welcome is not None


def test_stranger_is_told_to_say_ready() -> None:
    bench = Bench()
    worker = bench.worker(ready=False)
    worker.ping()
    assert worker.received == [c.NoSession()]
    bench.post(WorkerBad(worker.peer, InvalidArgument("bad_message", "junk")))
    assert worker.received == [c.NoSession()]


def test_ping_is_answered_and_shows_the_work_loop() -> None:
    bench, worker, _client = setup()
    worker.say(c.WorkerPing(n=9, steps=42, busy=True))
    assert c.WorkerPong(n=9) in worker.received
    status = device(bench).worker
    assert status is not None
    assert (status.steps, status.busy) == (42, True)


# --- two workers ------------------------------------------------------------------------------


def test_restarted_worker_gets_the_device_as_soon_as_the_old_one_is_known_dead() -> None:
    bench, old, client = setup()
    new = bench.worker(epoch=2)
    assert new.welcome is None
    assert new.refused is None
    # The probe makes the transport find out.
    assert old.received[-1] == c.WorkerPong()
    bench.kill(old)
    assert new.welcome is not None
    client.ok(client.register("second"))


def test_restarted_worker_gets_the_device_when_the_old_one_stays_silent() -> None:
    bench, old, _client = setup()
    old.dead = True
    new = bench.worker(epoch=2)
    bench.advance(7_000, alive=False)
    assert new.welcome is not None
    assert agent(bench).state == "ready"


def test_second_worker_of_a_served_device_is_sent_away() -> None:
    bench, old, client = setup()
    new = bench.worker(epoch=2)
    # What was on its way before proves nothing.
    old.ping()
    assert new.refused is None
    bench.now_ns += 1_500 * MS
    old.ping()
    assert new.refused is not None
    assert new.refused.reason == "device_taken"
    assert new.refused.details["pid"] == 1001
    run_once(old, client)


def test_older_worker_of_a_served_device_is_sent_away_at_once() -> None:
    bench = Bench()
    bench.worker(epoch=5)
    zombie = bench.worker(epoch=4)
    assert zombie.refused is not None


def test_worker_with_a_clock_set_back_waits_and_is_accepted() -> None:
    bench, worker, _client = setup()
    bench.kill(worker)
    old = bench.worker(epoch=0)
    assert old.welcome is None
    bench.advance(7_000, alive=False)
    assert old.welcome is not None


def test_zombie_loses_to_the_younger_worker() -> None:
    bench, worker, _client = setup()
    bench.kill(worker)
    zombie = bench.worker(epoch=0)
    young = bench.worker(epoch=2)
    assert young.welcome is not None
    assert zombie.refused is not None
    assert zombie.refused.reason == "stale_worker"


def test_reconnected_worker_starts_afresh_and_stops_what_was_lost() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    lost_op = worker.job("coder").run.op
    again = bench.worker(epoch=1, peer=b"other-connection")
    assert again.welcome is not None
    assert again.cancelled() == [lost_op]
    assert again.all(c.Load)
    worker.finish(worker.job("coder"), "from the old connection")
    assert client.text(rid) == ""
    again.finish(again.job("coder"))
    client.done(rid)


def test_another_key_does_not_take_a_session_over_by_its_epoch() -> None:
    """The epoch is no secret: STATUS says it."""
    bench, worker, client = setup()
    rid = client.decode("coder")
    thief = ScriptedWorker(bench, epoch=worker.epoch, peer=b"thief")
    bench.workers[thief.peer] = thief
    thief.key = "another"
    thief.ready()
    assert thief.welcome is None
    assert thief.refused is not None
    assert thief.refused.reason == "device_taken"
    worker.finish(worker.job("coder"), "said by the first")
    assert client.text(rid) == "said by the first"


# --- loss and restart -------------------------------------------------------------------------


def test_worker_restart_loads_its_agents_again_within_the_ledger() -> None:
    bench, old, client = setup("coder", "writer")
    run_once(old, client)
    before = device(bench).promised
    bench.kill(old)
    assert {agent(bench, name).state for name in ("coder", "writer")} == {"waiting"}
    assert device(bench).promised == before
    new = bench.worker(epoch=2)
    assert new.welcome is not None
    assert new.welcome.conversations == [MAIN]
    assert [load.agent.agent for load in new.all(c.Load)] == ["coder", "writer"]
    # Their bytes were promised all the time: nothing needs to be asked.
    assert not new.all(c.Estimate)
    assert device(bench).promised == before
    rid = client.decode("coder", continue_=True)
    assert new.all(c.Run)[0].n_raw == 1
    assert new.job("coder").transcript == [1, 2, 3, 7, 8]
    new.finish(new.job("coder"))
    assert client.done(rid).state_version == 2


def test_job_without_a_released_token_is_retried_by_the_next_worker() -> None:
    bench, old, client = setup()
    rid = client.decode("coder")
    behind = client.decode("coder")
    old.start(old.job("coder"))
    old.tokens(old.job("coder"), "", [10])
    bench.kill(old)
    assert client.silent(rid)
    new = bench.worker(epoch=2)
    assert [run.job for run in new.all(c.Run)] == [1]
    assert new.job("coder").transcript == []
    new.finish(new.job("coder"), "again")
    assert client.text(rid) == "again"
    assert client.done(rid).state_version == 1
    new.finish(new.job("coder"))
    assert client.done(behind).state_version == 2


def test_job_with_a_released_token_ends_and_its_tokens_stay() -> None:
    bench, old, client = setup()
    rid = client.decode("coder")
    old.start(old.job("coder"), [1])
    old.tokens(old.job("coder"), "a", [10])
    bench.kill(old)
    error = client.error(rid)
    assert (error.code, error.reason, error.retryable) == (Code.UNAVAILABLE, "worker_lost", True)
    assert error.details["generated_tokens"] == 1
    assert bench.records[-1] == ConversationCommitted(
        conversation=MAIN,
        version=1,
        keep=0,
        ids=bytes([1, 0, 0, 0, 10, 0, 0, 0]),
        turns=[Turn(text="x", end=1), Turn(text="a", generated=True, end=2)],
    )


def test_token_held_back_by_credit_was_not_released() -> None:
    bench, old, client = setup()
    rid = client.decode("coder", window=0)
    old.start(old.job("coder"))
    old.tokens(old.job("coder"), "a", [10])
    bench.kill(old)
    new = bench.worker(epoch=2)
    new.finish(new.job("coder"), "b")
    client.send(m.Credit(rid=rid, ack=0, upto=9))
    assert client.text(rid) == "b"
    client.done(rid)


def test_retries_are_bounded() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    for epoch in (2, 3):
        bench.kill(worker)
        worker = bench.worker(epoch=epoch)
        assert client.silent(rid)
        worker.job("coder")
    bench.kill(worker)
    error = client.error(rid)
    assert (error.reason, error.details["attempts"]) == ("worker_lost", 3)


def test_stopped_job_is_not_retried() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    client.send(m.Cancel(rid=rid))
    bench.kill(worker)
    assert client.error(rid).code == Code.CANCELLED
    assert not bench.worker(epoch=2).all(c.Run)


def test_output_of_a_stale_attempt_is_dropped() -> None:
    bench, old, client = setup()
    rid = client.decode("coder")
    stale = old.job("coder")
    bench.kill(old)
    new = bench.worker(epoch=2)
    fresh = new.job("coder")
    old.dead = False
    # The old process was not dead after all: its connection and its epoch are.
    old.start(stale)
    old.tokens(stale, "stale", [66])
    new.reply(stale.run, c.Started, [b""], job=1, keep=0)
    new.say(
        c.RunTokens(
            broker_epoch=100, op=fresh.run.op, worker_epoch=1, job=1, text="stale", ids=[66]
        )
    )
    new.say(
        c.RunTokens(broker_epoch=99, op=fresh.run.op, worker_epoch=2, job=1, text="stale", ids=[66])
    )
    new.finish(fresh, "fresh")
    assert client.text(rid) == "fresh"
    client.done(rid)


def test_jobs_wait_for_an_absent_worker_and_not_for_ever() -> None:
    bench, worker, client = setup()
    bench.kill(worker)
    early = client.decode("coder")
    brief = client.decode("coder", conversation="side", queue_ms=1000)
    bench.advance(2_000)
    assert client.error(brief).reason == "queue_timeout"
    bench.advance(29_000)
    error = client.error(early)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "no_worker")
    assert client.error(client.decode("coder")).reason == "no_worker"
    new = bench.worker(epoch=2)
    run_once(new, client)


def test_silent_worker_is_lost() -> None:
    bench, worker, _client = setup()
    worker.dead = True
    bench.advance(7_000)
    assert device(bench).worker is None
    assert agent(bench).state == "waiting"


def test_worker_that_leaves_gives_its_jobs_back() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.say(c.WorkerBye(worker_epoch=1))
    new = bench.worker(epoch=2)
    new.finish(new.job("coder"))
    client.done(rid)


def test_job_that_a_leaving_worker_cuts_off_says_what_stays() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"), [1])
    worker.tokens(worker.job("coder"), "a", [10])
    worker.fail(worker.job("coder").run, Code.UNAVAILABLE, "worker_draining")
    error = client.error(rid)
    assert (error.code, error.reason, error.retryable) == (Code.UNAVAILABLE, "worker_left", True)
    assert error.details["generated_tokens"] == 1
    assert "1 tokens stay in the conversation" in error.message
    ended = client.got(rid, m.Error)[0]
    assert ended.usage is not None
    assert (ended.usage.generated_tokens, ended.usage.state_version) == (1, 1)
    assert isinstance(bench.records[-1], ConversationCommitted)


def test_job_that_a_leaving_worker_did_not_begin_is_done_by_the_next_one() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    behind = client.decode("coder", conversation="side")
    worker.fail(worker.job("coder").run, Code.UNAVAILABLE, "worker_draining")
    worker.fail(worker.job("coder", "side").run, Code.UNAVAILABLE, "worker_draining")
    assert len(worker.all(c.Run)) == 2, "nothing more is sent to a worker that leaves"
    late = client.decode("coder", conversation="late")
    assert len(worker.all(c.Run)) == 2
    worker.say(c.WorkerBye(worker_epoch=1))
    new = bench.worker(epoch=2)
    for conversation, waiting in (("main", rid), ("side", behind), ("late", late)):
        new.finish(new.job("coder", conversation))
        client.done(waiting)


def test_registration_that_meets_a_leaving_worker_is_done_by_the_next_one() -> None:
    bench, worker, client = setup()
    worker.auto -= {c.Load}
    rid = client.register("more")
    worker.fail(worker.waiting(c.Load), Code.UNAVAILABLE, "worker_draining")
    worker.say(c.WorkerBye(worker_epoch=1))
    bench.worker(epoch=2)
    client.ok(rid)


def test_agent_that_cannot_be_loaded_again_is_suspended_and_comes_back_when_asked() -> None:
    bench, worker, client = setup("coder", "writer")
    bench.kill(worker)
    waiting = client.decode("coder")
    new = bench.worker(epoch=2, ready=False)
    new.auto -= {c.Load}
    new.ready()
    coder, writer = list(new.held)
    new.fail(coder, Code.INTERNAL, "load_failed", "bad sector")
    new.answer(writer)
    assert client.error(waiting).reason == "load_failed"
    status = agent(bench)
    assert status.state == "suspended"
    assert status.reason is not None
    assert status.reason.reason == "load_failed"
    assert agent(bench, "writer").state == "ready"
    assert client.error(client.decode("coder")).reason == "load_failed"
    new.auto.add(c.Load)
    assert client.ok(client.register("coder"))["state"] == "ready"
    run_once(new, client)


def test_agent_whose_file_was_missing_comes_back_when_it_is_used() -> None:
    bench, worker, client = setup("coder", "writer")
    run_once(worker, client)
    tokens = bench.core.report(bench.now_ns).agents[0].conversations[0].tokens
    bench.kill(worker)
    new = bench.worker(epoch=2, ready=False)
    new.auto -= {c.Load, c.Estimate}
    new.ready()
    for load in list(new.held):
        new.fail(load, Code.NOT_FOUND, "model_missing")
    assert agent(bench).state == "suspended"
    assert client.error(client.decode("coder")).reason == "model_missing"
    assert not new.all(c.Estimate), "not tried over and over"
    bench.advance(3_000)
    assert not new.all(c.Estimate), "nor as long as nobody wants it"
    first, behind = client.decode("coder"), client.decode("coder", conversation="side")
    assert agent(bench).state == "loading"
    assert client.silent(first)
    new.fail(new.waiting(c.Estimate), Code.NOT_FOUND, "model_missing", "still not here")
    assert [client.error(rid).message for rid in (first, behind)] == ["still not here"] * 2
    assert len(new.all(c.Estimate)) == 1
    bench.advance(3_000)
    new.auto |= {c.Load, c.Estimate}
    run_once(new, client)
    status = agent(bench)
    assert (status.state, status.reason) == ("ready", None)
    assert status.conversations[0].tokens > tokens, "its conversation goes on"
    assert agent(bench, "writer").state == "suspended"


def test_what_would_be_refused_anyway_tries_no_agent_again() -> None:
    bench, worker, client = setup()
    bench.kill(worker)
    new = bench.worker(epoch=2, ready=False)
    new.auto -= {c.Load}
    new.ready()
    new.fail(new.waiting(c.Load), Code.INTERNAL, "load_failed")
    bench.advance(3_000)
    assert client.error(client.decode("coder", conversation="no/name")).reason != "load_failed"
    assert agent(bench).state == "suspended"
    bench.kill(new)
    assert client.error(client.decode("coder")).reason == "load_failed"


def test_estimates_of_many_returning_agents_are_asked_a_few_at_a_time() -> None:
    names = [f"a{i}" for i in range(10)]
    bench, _worker, _client = setup(*names)
    late = bench.restart()
    worker = late.worker(epoch=2, ready=False)
    worker.auto -= {c.Estimate}
    worker.ready()
    assert len(worker.held) == 4
    for answered in range(10):
        # Each has its own time: all of them together take longer than one may.
        late.advance(7_000)
        worker.answer(worker.held[0])
        assert len(worker.all(c.Estimate)) == min(10, 5 + answered)
    assert {agent(late, name).state for name in names} == {"ready"}


def test_estimates_that_wait_for_their_turn_end_with_the_worker() -> None:
    bench = Bench(config_of(worker_wait_ms=0))
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    rids = [client.register(f"a{i}") for i in range(7)]
    client.send(m.Cancel(rid=rids[6]))
    assert client.error(rids[6]).code == Code.CANCELLED
    client.send(m.Cancel(rid=rids[0]))
    assert len(worker.all(c.Estimate)) == 5
    bench.kill(worker)
    for rid in rids[1:6]:
        assert client.error(rid).reason == "worker_lost"


def test_promise_outlives_a_second_loss_while_loading_again() -> None:
    bench, worker, _client = setup()
    before = device(bench).promised
    bench.kill(worker)
    second = bench.worker(epoch=2, ready=False)
    second.auto -= {c.Load}
    second.ready()
    assert agent(bench).state == "loading"
    bench.kill(second)
    assert (agent(bench).state, device(bench).promised) == ("waiting", before)
    third = bench.worker(epoch=3)
    assert not third.all(c.Estimate)
    assert agent(bench).state == "ready"


def test_agent_removed_while_it_is_loaded_again() -> None:
    bench, worker, client = setup()
    bench.kill(worker)
    new = bench.worker(epoch=2, ready=False)
    new.auto -= {c.Load}
    new.ready()
    late = new.waiting(c.Load)
    client.ok(client.unregister("coder"))
    assert device(bench).promised.promised_bytes == 0
    new.answer(late)
    assert not bench.core.report(bench.now_ns).agents
    new.auto.add(c.Load)
    client.ok(client.register("coder"))


# --- broker restart ---------------------------------------------------------------------------


def test_broker_restart_brings_back_agents_transcripts_and_versions() -> None:
    bench, worker, client = setup()
    run_once(worker, client)
    client.ok(client.register("gone"))
    client.ok(client.unregister("gone"))
    late = bench.restart()
    assert [a.agent for a in late.core.report(late.now_ns).agents] == ["coder"]
    assert agent(late).state == "waiting"
    worker = late.worker(epoch=1)
    assert worker.welcome is not None
    assert worker.welcome.conversations == [MAIN]
    assert len(worker.all(c.Estimate)) == 1
    assert len(worker.all(c.Load)) == 1
    status = agent(late)
    assert (status.state, status.conversations[0].version) == ("ready", 1)
    other = late.client()
    stale = other.decode("coder", expect_version=0)
    assert other.error(stale).reason == "version_mismatch"
    rid = other.decode("coder", continue_=True)
    assert worker.job("coder").transcript == [1, 2, 3, 7, 8]
    worker.finish(worker.job("coder"))
    assert other.done(rid).state_version == 2


def test_job_in_flight_at_a_broker_crash_is_reported_unknown() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"))
    worker.tokens(worker.job("coder"), "a", [10])
    late = bench.restart()
    again = late.client()
    again.send(m.Resume(rid=rid))
    assert again.error(rid).reason == "unknown_rid"


def test_agent_that_does_not_fit_any_more_is_suspended_until_it_does() -> None:
    bench, _worker, _client = setup("coder")
    late = bench.restart()
    worker = late.worker(epoch=2, ready=False, total_bytes=130 * MIB)
    worker.ready()
    assert agent(late).state == "ready"
    later = late.restart()
    tight = later.worker(epoch=3, ready=False, total_bytes=130 * MIB)
    tight.ready(
        memory=Memory(used_bytes=50 * MIB, own_bytes=0, foreign_bytes=50 * MIB),
    )
    status = agent(later)
    assert status.state == "suspended"
    assert status.reason is not None
    assert status.reason.reason == LEDGER_DENY
    client = later.client()
    assert client.error(client.decode("coder")).reason == LEDGER_DENY
    assert not tight.all(c.Load)
    tight.residency(foreign_bytes=0)
    assert agent(later).state == "ready"
    run_once(tight, client)


def test_restored_agent_whose_load_fails_leaves_no_bytes_behind() -> None:
    bench, _worker, _client = setup()
    late = bench.restart()
    worker = late.worker(epoch=2, ready=False)
    worker.auto -= {c.Load}
    worker.ready()
    assert device(late).promised.promised_bytes > 0
    worker.fail(worker.waiting(c.Load), Code.INTERNAL, "load_failed")
    assert agent(late).state == "suspended"
    assert device(late).promised.promised_bytes == 0
    # A failed load is not a lack of room: it is not tried over and over.
    worker.residency(foreign_bytes=10)
    worker.residency(foreign_bytes=0)
    assert len(worker.all(c.Load)) == 1


def test_suspended_agent_returns_when_another_leaves() -> None:
    bench, _worker, client = setup("coder")
    client.ok(client.register("writer", "other"))
    late = bench.restart()
    late.worker(epoch=2, total_bytes=150 * MIB)
    states = {a.agent: a.state for a in late.core.report(late.now_ns).agents}
    assert states == {"coder": "ready", "writer": "suspended"}
    other = late.client()
    other.ok(other.unregister("coder"))
    assert agent(late, "writer").state == "ready"


def test_agent_whose_file_was_replaced_does_not_go_on_with_a_foreign_transcript(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, worker, client = setup("coder", "fresh")
    run_once(worker, client)
    late = bench.restart()
    changed = msgspec.structs.replace(MODELS["small"].info("small"), n_vocab=2000, model="m-new")
    new = late.worker(epoch=2, ready=False)
    monkeypatch.setattr(type(MODELS["small"]), "info", lambda self, name: changed)
    new.ready()
    assert agent(late).state == "suspended"
    reason = agent(late).reason
    assert reason is not None
    assert reason.reason == "model_changed"
    # Without a transcript there is nothing to lose.
    assert agent(late, "fresh").state == "ready"
    assert agent(late, "fresh").model_id == "m-new"
    # Nor if there is none any more.
    client = late.client()
    client.ok(client.reset("coder"))
    assert agent(late).state == "ready"
    assert agent(late).model_id == "m-new"
    run_once(new, client)


OLD, NEW = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("old", "new", "told_by", "state"),
    [
        (OLD, NEW, "estimate", "suspended"),
        (OLD, NEW, "load", "suspended"),
        (OLD, OLD, "estimate", "ready"),
        (OLD, OLD, "load", "ready"),
        (OLD, None, "load", "ready"),
        (None, NEW, "load", "ready"),
    ],
)
def test_file_of_the_same_size_is_told_by_its_digest_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, old: str | None, new: str | None, told_by: str, state: str
) -> None:
    info = MODELS["small"].info("small")

    def becomes(model: str, digest: str | None) -> None:
        changed = msgspec.structs.replace(info, model=model, digest=digest)
        monkeypatch.setattr(type(MODELS["small"]), "info", lambda self, name: changed)

    becomes("m-old", old)
    bench, worker, client = setup()
    run_once(worker, client)
    late = bench.restart()
    becomes("m-new", new if told_by == "estimate" else None)
    worker = late.worker(epoch=2, ready=False)
    worker.auto -= {c.Load}
    worker.ready()
    if told_by == "load":
        load = worker.waiting(c.Load)
        worker.reply(
            load, c.Loaded, weights_bytes=load.weights_bytes, pool_bytes=load.pool_bytes, digest=new
        )
    else:
        for load in worker.all(c.Load):
            worker.reply(
                load, c.Loaded, weights_bytes=load.weights_bytes, pool_bytes=load.pool_bytes
            )
    assert agent(late).state == state
    if state == "suspended":
        assert device(late).promised.promised_bytes == 0
        client = late.client()
        client.ok(client.reset("coder"))
        assert agent(late).state == "loading"


def test_agent_of_a_device_that_is_not_configured_any_more() -> None:
    bench, _worker, _client = setup()
    bench.config = config_of(DeviceConfig(id="cpu:1", kind="cpu", capacity="1 GiB"))
    late = bench.restart()
    client = late.client()
    assert agent(late).state == "suspended"
    assert client.error(client.decode("coder")).reason == "device_not_configured"
    assert late.worker("cpu").refused is not None
    client.ok(client.unregister("coder"))


# --- residency --------------------------------------------------------------------------------


def test_status_shows_promised_beside_resident_and_where_conversations_are() -> None:
    bench, worker, client = setup()
    run_once(worker, client)
    assert agent(bench).conversations[0].where == "slot"
    assert agent(bench).conversations[0].kv_tokens == 5
    lines = [Line("weights:m-small", 90 * MIB), Line("pool:m-small@f16", 20 * MIB)]
    place = c.Place(conversation=MAIN, where="parked", n_tokens=5, parked_bytes=777)
    worker.residency(
        foreign_bytes=30 * MIB,
        lines=lines,
        host_lines=[Line("parked:local/coder/main", 777)],
        places=[place],
        swaps=3,
    )
    status = device(bench)
    assert status.resident == lines
    assert (status.resident_bytes, status.swaps) == (110 * MIB, 3)
    assert status.parked[0].bytes == 777
    # used = foreign here, so the resident lines are more than what is used.
    assert status.unattributed_bytes == -110 * MIB
    assert status.budget_bytes == (1024 - 30) * MIB
    # What was allocated replaces the estimate.
    assert Line("weights:m-small", 90 * MIB, detail="small") in status.promised.lines
    conversation = agent(bench).conversations[0]
    assert (conversation.where, conversation.parked_bytes) == ("parked", 777)


def test_pool_opened_at_first_use_is_booked_at_its_real_size() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.loaded_sizes = {"pool_bytes": None}
    client = bench.client()
    assert client.ok(client.register("coder"))["unmeasured"] is True
    shape = worker.all(c.Load)[0].shape
    # A pool of another shape is the one from before: its size says nothing about this one.
    other = PoolShape(256, 1)
    worker.residency(lines=[Line("pool:m-small@f16", 1 * MIB, shape=other)])
    assert agent(bench).unmeasured is True
    worker.residency(lines=[Line("pool:m-small@f16", 21 * MIB, shape=shape)])
    assert agent(bench).unmeasured is False
    assert agent(bench).pool_bytes == 21 * MIB


def test_old_or_foreign_reports_are_ignored() -> None:
    bench, worker, _client = setup()
    worker.seq = 10
    worker.residency(foreign_bytes=5 * MIB)
    worker.seq = 3
    worker.residency(foreign_bytes=500 * MIB)
    bench.broker_epoch = 99
    worker.seq = 20
    worker.residency(foreign_bytes=500 * MIB)
    assert device(bench).budget_bytes == (1024 - 5) * MIB


def test_adopted_states_are_shown_from_ready_on() -> None:
    bench, worker, client = setup()
    run_once(worker, client)
    bench.kill(worker)
    assert agent(bench).conversations[0].where == "absent"
    new = bench.worker(epoch=2, ready=False)
    ghost = ConversationKey("local", "nobody", "main")
    new.parked = [
        c.Parked(conversation=MAIN, model="m-small", n_tokens=5, bytes=99),
        c.Parked(conversation=ghost, model="m-small", n_tokens=5, bytes=99),
    ]
    new.ready()
    conversation = agent(bench).conversations[0]
    assert (conversation.where, conversation.kv_tokens) == ("parked", 5)


def test_growing_foreign_use_loses_nothing() -> None:
    bench, worker, client = setup()
    run_once(worker, client)
    worker.residency(foreign_bytes=1000 * MIB)
    worker.residency(foreign_bytes=1000 * MIB)
    assert [item.budget_bytes for item in worker.all(c.Budget)] == [1024 * MIB, 24 * MIB]
    assert agent(bench).state == "ready"
    assert client.error(client.register("more", "other")).details["foreign_bytes"] == 1000 * MIB
    # A job that would not fit even alone waits here, not in the place of one that fits.
    rid = client.decode("coder", continue_=True)
    assert not worker.jobs
    (job,) = bench.core.report(bench.now_ns).jobs
    assert (job.state, job.waiting, job.waiting_ms) == ("queued", "foreign", None)
    worker.residency(foreign_bytes=0)
    worker.finish(worker.job("coder"))
    client.done(rid)


def test_base_follows_the_worker_and_less_counts_only_with_a_sample_from_after_it() -> None:
    bench, worker, _client = setup()
    before = device(bench).promised.promised_bytes

    def base(size: int, age_ms: int = 0, foreign_bytes: int = 0) -> int:
        memory = Memory(
            used_bytes=foreign_bytes, own_bytes=0, foreign_bytes=foreign_bytes, age_ms=age_ms
        )
        worker.residency(lines=[Line("base", size)], memory=memory)
        return device(bench).promised.promised_bytes - before

    bench.advance(100)
    assert base(50 * MIB) == 50 * MIB
    # A sample from before: what the base gave back may be somebody's by now.
    bench.advance(100)
    assert base(20 * MIB, age_ms=300) == 50 * MIB
    assert base(60 * MIB, age_ms=300) == 60 * MIB
    # So old that nothing is admitted on it.
    bench.advance(7000)
    assert base(20 * MIB, age_ms=6500) == 60 * MIB
    assert base(20 * MIB) == 20 * MIB
    for nonsense in (-1, 1 << 63):
        worker.residency(lines=[Line("base", nonsense)])
        assert device(bench).promised.promised_bytes - before == 20 * MIB
    assert agent(bench).state == "ready"


def test_what_a_process_may_grow_by_is_promised_and_not_resident() -> None:
    bench, worker, _client = setup()
    before = device(bench).promised.promised_bytes
    for used, booked in [(50, 66), (64, 68), (68, 72)]:
        bench.advance(100)
        memory = Memory(used_bytes=used * MIB, own_bytes=used * MIB, foreign_bytes=0)
        lines = [Line("base", used * MIB)]
        worker.residency(lines=lines, memory=memory, base_bytes=booked * MIB)
        now = device(bench)
        assert now.promised.promised_bytes - before == booked * MIB
        assert (now.resident_bytes, now.unattributed_bytes) == (used * MIB, 0)
    worker.residency(lines=[Line("base", 50 * MIB)], base_bytes=-1)
    assert device(bench).promised.promised_bytes - before == 72 * MIB


def test_less_base_lets_those_in_who_did_not_fit() -> None:
    bench, worker, client = setup()
    rest = 1024 * MIB - device(bench).promised.promised_bytes
    bench.advance(1)
    worker.residency(lines=[Line("base", rest - 10 * MIB)])
    assert client.error(client.register("more", "other")).reason == LEDGER_DENY
    bench.advance(1)
    worker.residency(lines=[Line("base", 1 * MIB)])
    client.ok(client.register("more", "other"))


# --- drain ------------------------------------------------------------------------------------


def test_drain_tells_everybody_finishes_what_runs_and_exits() -> None:
    bench, worker, client = setup()
    running, queued = client.decode("coder"), client.decode("coder")
    worker.start(worker.job("coder"))
    bench.shut_down(5000)
    assert client.got(kind=m.GoAway)[0].drain_ms == 5000
    assert client.error(queued).reason == "draining"
    assert worker.waiting(c.Drain).drain_ms == 5000
    assert client.error(client.register("more")).reason == "draining"
    assert client.error(client.decode("coder", conversation="side")).reason == "draining"
    worker.finish(worker.job("coder"))
    client.done(running)
    assert bench.exit_code is None
    worker.say(c.WorkerBye(worker_epoch=1))
    assert bench.exit_code == 0


def test_drain_stops_registrations() -> None:
    bench, worker, client = setup()
    worker.auto -= {c.Load}
    rid = client.register("more")
    bench.shut_down()
    assert client.error(rid).reason == "draining"


def test_job_that_the_worker_cuts_off_for_the_drain_says_so() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"))
    worker.tokens(worker.job("coder"), "a", [10])
    bench.shut_down()
    worker.done(worker.job("coder"), "cancelled")
    error = client.error(rid)
    assert (error.reason, error.retryable) == ("draining", True)
    assert isinstance(bench.records[-1], ConversationCommitted)


def test_drain_ends_soon_after_its_deadline_and_keeps_the_tokens() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"), [1])
    worker.tokens(worker.job("coder"), "a", [10])
    bench.shut_down(1000)
    bench.advance(1000 + CUT_OFF_MS)
    assert bench.exit_code == 0
    assert client.error(rid).reason == "draining"
    assert isinstance(bench.records[-1], ConversationCommitted)


def test_what_is_said_until_the_deadline_of_a_drain_is_in_the_record() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    worker.start(worker.job("coder"), [1])
    worker.tokens(worker.job("coder"), "a", [10])
    bench.shut_down(1000)
    bench.advance(1000)
    # Its time began later than ours: this is in the state that it parks.
    worker.tokens(worker.job("coder"), "b", [11])
    worker.fail(worker.job("coder").run, Code.UNAVAILABLE, "worker_draining")
    worker.say(c.WorkerBye(worker_epoch=1))
    assert bench.exit_code == 0
    assert client.error(rid).reason == "draining"
    record = bench.records[-1]
    assert isinstance(record, ConversationCommitted)
    assert record.ids == pack_tokens([1, 10, 11])


def test_drain_without_workers_or_a_second_signal_exits_at_once() -> None:
    idle = Bench()
    idle.shut_down()
    assert idle.exit_code == 0
    bench, _worker, _client = setup()
    bench.shut_down()
    assert bench.exit_code is None
    bench.shut_down()
    assert bench.exit_code == 0


def test_restart_after_a_drain_has_everything() -> None:
    bench, worker, client = setup()
    run_once(worker, client)
    bench.shut_down()
    worker.say(c.WorkerBye(worker_epoch=1))
    late = bench.restart()
    late.worker(epoch=2)
    assert agent(late).conversations[0].tokens == 5
    assert any(isinstance(record, AgentRegistered) for record in bench.records)
