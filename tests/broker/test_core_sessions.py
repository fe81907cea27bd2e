"""Sessions in the core: HELLO, silence, BYE, and what strangers get."""

from __future__ import annotations

import msgspec
import pytest
from scripted_worker import PRINCIPAL, Bench, Client, config_of

from vram_conductor.broker.events import ClientBad, ClientGone, ClientMessageIn, Event, Tick
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.commands import Estimate
from vram_conductor.protocol.errors import Code, InvalidArgument
from vram_conductor.protocol.status import AgentList, StatusReport


def test_hello_opens_a_session_and_announces_the_limits() -> None:
    bench = Bench(config_of(queued_jobs_max=77, orphan_ms=5))
    client = bench.client()
    welcome = client.got(kind=m.Welcome)[0]
    assert welcome.broker_epoch == 100
    assert welcome.principal == PRINCIPAL
    assert welcome.heartbeat_ms == limits.HEARTBEAT_MS
    assert welcome.limits["queued_jobs_max"] == 77
    assert welcome.limits["orphan_ms"] == 5
    usual = Bench().client().got(kind=m.Welcome)[0]
    assert usual.limits["orphan_ms"] == limits.ORPHAN_MS
    client.send(m.Hello(v=(1, 5)))
    again = client.got(kind=m.Welcome)[1]
    assert again.session == welcome.session
    assert bench.client("c2").got(kind=m.Welcome)[0].session != welcome.session


@pytest.mark.parametrize(
    "message",
    [
        m.Ping(),
        m.Status(rid=b"r" * 16),
        m.Register(rid=b"r" * 16, agent="a", model="small"),
        m.Decode(rid=b"r" * 16, agent="a", prompt="x"),
        m.Cancel(rid=b"r" * 16),
        m.Bye(),
    ],
)
def test_anything_before_hello_is_refused(message: m.ClientMessage) -> None:
    bench = Bench()
    client = Client(bench, b"stranger")
    client.send(message)
    answer = client.got()[0]
    assert isinstance(answer, m.Error)
    assert answer.rid == getattr(message, "rid", b"")
    assert (answer.error.code, answer.error.reason) == (Code.FAILED_PRECONDITION, "no_session")


def test_wrong_major_version_is_refused() -> None:
    bench = Bench()
    client = Client(bench, b"c")
    client.send(m.Hello(v=(9, 0)))
    answer = client.got()[0]
    assert answer.error.reason == "unsupported_version"
    assert not len(bench.core._state.sessions)


def test_undecodable_frames_are_answered() -> None:
    bench = Bench()
    bench.client()
    bench.post(ClientBad(b"c1", InvalidArgument("bad_message", "junk")))
    answer = bench.inbox[b"c1"][-1]
    assert (answer.rid, answer.error.reason) == (b"", "bad_message")


def test_invalid_request_names_its_rid_and_harms_nothing() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    assert client.error(client.register("coder", n_ctx=0)).code == Code.INVALID_ARGUMENT
    assert client.error(client.register("bad name!")).code == Code.INVALID_ARGUMENT
    assert not bench.core.report(bench.now_ns).agents


def test_ping_is_answered() -> None:
    client = Bench().client()
    client.send(m.Ping(n=5))
    assert client.got(kind=m.Pong) == [m.Pong(n=5)]


def test_silent_client_loses_its_session() -> None:
    bench = Bench()
    client = bench.client()
    bench.gone.add(client.peer)
    bench.advance(limits.HEARTBEAT_MS * (limits.MISSED_HEARTBEATS_MAX + 1))
    assert not len(bench.core._state.sessions)
    client.send(m.Ping())
    assert client.got()[-1].error.reason == "no_session"


def test_talking_client_keeps_its_session() -> None:
    bench = Bench()
    bench.client()
    bench.advance(20_000)
    assert len(bench.core._state.sessions) == 1


def test_gone_and_bye_are_idempotent() -> None:
    bench = Bench()
    client = bench.client()
    client.send(m.Bye())
    for event in (ClientGone(client.peer), ClientGone(b"never seen"), Tick()):
        bench.post(event)
    assert not len(bench.core._state.sessions)


def test_sessions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.SESSIONS_MAX", 2)
    bench = Bench()
    one = bench.client("one")
    bench.client("two")
    three = bench.client("three")
    assert three.got()[0].error.reason == "too_many_sessions"
    one.send(m.Bye())
    three.send(m.Hello(v=(1, 0)))
    assert three.got(kind=m.Welcome)


def test_principals_do_not_see_each_others_agents_and_rids() -> None:
    bench = Bench()
    worker = bench.worker()
    mine = bench.client("mine")
    mine.ok(mine.register("coder"))
    rid = mine.decode("coder")

    def other(message: m.ClientMessage) -> Event:
        return ClientMessageIn(b"other", "somebody", same_user_ipc=False, message=message)

    bench.post(other(m.Hello(v=(1, 0))))
    bench.post(other(m.Cancel(rid=rid)))
    assert bench.inbox[b"other"][-1].error.reason == "unknown_rid"
    bench.post(other(m.Decode(rid=b"x" * 16, agent="coder", prompt="x")))
    assert bench.inbox[b"other"][-1].error.reason == "no_such_agent"
    bench.post(other(m.List(rid=b"l" * 16)))
    assert bench.inbox[b"other"][-1].body == {"agents": []}
    bench.post(other(m.Register(rid=b"r" * 16, agent="coder", model="small", n_ctx=256)))
    assert isinstance(bench.inbox[b"other"][-1], m.Ok)
    # Only the same user on this machine may name files by path.
    assert [estimate.bare_path for estimate in worker.all(Estimate)] == [True, False]
    worker.finish(worker.job("coder"))
    mine.done(rid)


def test_status_and_list_are_typed() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    client.decode("coder")
    client.decode("coder")
    for message in (m.Status(rid=bench.rid()), m.List(rid=bench.rid())):
        client.send(message)
    status, listed = client.got(kind=m.Ok)[-2:]
    report = msgspec.convert(status.body, StatusReport)
    assert (report.queued, report.agents_total, report.sessions) == (1, 1, 1)
    assert [job.state for job in report.jobs] == ["sent", "queued"]
    agents = msgspec.convert(listed.body, AgentList).agents
    assert (agents[0].agent, agents[0].queued, agents[0].running) == ("coder", 1, 1)
    # The wire carries plain maps only.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status))["body"]["devices"]


def test_restored_status_needs_no_worker() -> None:
    bench = Bench()
    report = bench.core.report(bench.now_ns + 1_000_000_000)
    assert (report.devices[0].worker, report.devices[0].absent_ms) == (None, 1000)
