"""What REGISTER leaves to the configuration: a default is no demand."""

from __future__ import annotations

import pytest
from scripted_worker import Bench, config_of, shape_of

from vram_conductor.broker.journal.records import AgentRegistered
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import Code


def test_a_default_beyond_the_training_is_shortened_and_said_so() -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    worker = bench.worker()
    client = bench.client()
    rid = client.register("coder", "short", n_ctx=None)
    assert client.ok(rid)["n_ctx"] == 2048
    assert [estimate.n_ctx for estimate in worker.all(c.Estimate)] == [4096, 2048]
    load = worker.all(c.Load)[0]
    assert (load.n_ctx, load.shape) == (2048, shape_of(2048))
    notes = [news.note for news in client.got(rid, m.Progress)]
    assert [note for note in notes if note] == [
        "the default n_ctx 4096 is beyond the 2048 tokens that short was trained with: "
        "taking n_ctx 2048"
    ]
    record = next(record for record in bench.records if isinstance(record, AgentRegistered))
    assert record.spec.n_ctx == 2048


def test_a_demand_beyond_the_training_is_refused() -> None:
    bench = Bench(config_of(default_n_ctx=1024))
    bench.worker()
    client = bench.client()
    error = client.error(client.register("coder", "short", n_ctx=4096))
    assert error.reason == "n_ctx_beyond_training"
    assert not bench.core.report(bench.now_ns).agents


def test_the_same_request_without_n_ctx_is_the_same_agent() -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    worker = bench.worker()
    client = bench.client()
    first = client.ok(client.register("coder", "short", n_ctx=None))
    assert client.ok(client.register("coder", "short", n_ctx=None)) == first
    # To ask for what it has is no other request, either.
    assert client.ok(client.register("coder", "short", n_ctx=2048)) == first
    assert len(worker.all(c.Load)) == 1
    error = client.error(client.register("coder", "short", n_ctx=1024))
    assert error.code == Code.ALREADY_EXISTS
    assert error.details["differences"] == {"n_ctx": [2048, 1024]}


def test_a_default_is_no_other_request_than_the_number_only_where_it_is_equal() -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    bench.worker()
    client = bench.client()
    client.ok(client.register("coder", "short", n_ctx=1024))
    error = client.error(client.register("coder", "short", n_ctx=None))
    assert error.details["differences"] == {"n_ctx": [1024, 4096]}


def test_whoever_joins_while_it_is_shortened_gets_the_same_answer() -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client, other = bench.client("one"), bench.client("two")
    rids = [(client, client.register("coder", "short", n_ctx=None))]
    worker.answer(worker.waiting(c.Estimate))
    assert worker.waiting(c.Estimate).n_ctx == 2048
    rids.append((other, other.register("coder", "short", n_ctx=None)))
    worker.answer(worker.waiting(c.Estimate))
    assert [who.ok(rid)["n_ctx"] for who, rid in rids] == [2048, 2048]


def test_cancelled_while_it_is_shortened_leaves_nothing() -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = client.register("coder", "short", n_ctx=None)
    worker.answer(worker.waiting(c.Estimate))
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).reason == "cancelled"
    # The broker has forgotten the question: a late answer changes nothing.
    worker.answer(worker.waiting(c.Estimate))
    assert not worker.all(c.Load)
    assert not bench.core.report(bench.now_ns).agents


@pytest.mark.parametrize("trained", [0, -1, 4096, 5000, "2048", None])
def test_a_worker_that_says_nonsense_about_the_training_is_asked_once(trained: object) -> None:
    bench = Bench(config_of(default_n_ctx=4096))
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = client.register("coder", "short", n_ctx=None)
    worker.fail(
        worker.waiting(c.Estimate),
        Code.OUT_OF_RANGE,
        "n_ctx_beyond_training",
        n_ctx_train=trained,
    )
    assert client.error(rid).reason == "n_ctx_beyond_training"
    assert not worker.held


def test_kv_type_defaults_to_the_configuration() -> None:
    bench = Bench(config_of(default_kv_type="q8_0"))
    bench.worker()
    client = bench.client()
    first = client.ok(client.register("coder", kv_type=None))
    assert first["kv_type"] == "q8_0"
    assert client.ok(client.register("coder", kv_type="q8_0")) == first
    assert client.ok(client.register("other", kv_type="f16"))["kv_type"] == "f16"


def test_several_devices_shorten_alike() -> None:
    devices = [DeviceConfig(id=name, kind="cpu", capacity="1 GiB") for name in ("cpu", "cpu:1")]
    bench = Bench(config_of(*devices, default_n_ctx=4096))
    for device in devices:
        bench.worker(device.id)
    client = bench.client()
    assert client.ok(client.register("coder", "short", n_ctx=None))["n_ctx"] == 2048
