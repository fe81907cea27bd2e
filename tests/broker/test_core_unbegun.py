"""Jobs that are stopped before the worker has begun with them: their clients are answered at once,
whatever the worker is at (case B6)."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_worker import Bench, Client, ScriptedWorker, config_of

from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.errors import Code


def setup(**broker: Any) -> tuple[Bench, ScriptedWorker, Client]:
    bench = Bench(config_of(**broker))
    worker, client = bench.worker(), bench.client()
    client.ok(client.register("coder"))
    return bench, worker, client


def sent(worker: ScriptedWorker) -> list[c.Run]:
    return worker.all(c.Run)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"queue_ms": 300}, "queue_timeout"), ({"timeout_ms": 300}, "timeout"), ({}, "cancelled")],
)
def test_the_client_is_answered_at_once(fields: dict[str, Any], reason: str) -> None:
    bench, worker, client = setup()
    rid = client.decode("coder", **fields)
    run = worker.job("coder").run
    if not fields:
        client.send(m.Cancel(rid=rid))
    bench.advance(400)
    assert client.error(rid).reason == reason
    assert worker.cancelled() == [run.op]


def test_the_next_of_its_conversation_waits_for_the_worker_and_others_do_not() -> None:
    _bench, worker, client = setup()
    rid = client.decode("coder")
    old = worker.job("coder")
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code is Code.CANCELLED
    behind, beside = client.decode("coder"), client.decode("coder", conversation="beside")
    assert [run.conversation.conversation for run in sent(worker)] == ["main", "beside"]
    # It began just before it heard of it. Nobody has seen that, and it is in no record.
    worker.start(old)
    worker.tokens(old, "a", [10])
    worker.done(old, "cancelled")
    run = sent(worker)[-1]
    assert (run.conversation.conversation, run.version, run.transcript_tokens) == ("main", 0, 0)
    assert run.n_raw == 1, "the worker's own copy of the transcript may be another"
    worker.finish(worker.job("coder"))
    worker.finish(worker.job("coder", "beside"))
    assert client.text(behind) == client.text(beside) == "hi"
    assert client.done(behind).state_version == 1


def test_a_worker_that_says_nothing_is_not_waited_for_for_ever() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code is Code.CANCELLED
    behind = client.decode("coder")
    bench.advance(119_000)
    assert len(sent(worker)) == 1
    bench.advance(2_000)
    assert len(sent(worker)) == 2
    worker.finish(worker.job("coder"))
    client.done(behind)


def test_the_next_worker_has_nothing_to_do_with_it() -> None:
    bench, worker, client = setup()
    rid = client.decode("coder")
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code is Code.CANCELLED
    behind = client.decode("coder")
    bench.kill(worker)
    newer = bench.worker()
    assert len(sent(newer)) == 1
    newer.finish(newer.job("coder"))
    assert client.done(behind).state_version == 1


def test_those_that_the_worker_has_not_answered_count_as_there() -> None:
    _bench, worker, client = setup(worker_inflight=2)
    for number in range(2):
        rid = client.decode("coder", conversation=f"c{number}")
        client.send(m.Cancel(rid=rid))
        assert client.error(rid).code is Code.CANCELLED
    waits = client.decode("coder", conversation="waits")
    assert len(sent(worker)) == 2
    worker.done(worker.job("coder", "c0"), "cancelled")
    assert len(sent(worker)) == 3
    worker.finish(worker.job("coder", "waits"))
    client.done(waits)
