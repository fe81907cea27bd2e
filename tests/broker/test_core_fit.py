"""FIT in the core: what it says is what REGISTER does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import MIB, MODELS, Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.agents.fit_desk import SURVEYS_MAX
from vram_conductor.broker.events import ClientMessageIn, KeysChanged
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.fitting import KV_TYPES, Fit, FitReport, FitRow
from vram_conductor.protocol.keys import Quota

PLAIN = dict(MODELS)
SIXTEENTHS = {"f16": 16, "q8_0": 9, "q4_0": 5}


class Worker(ScriptedWorker):
    """Whose caches are smaller with smaller elements. ``refuses``: KV types that no model takes."""

    refuses: tuple[str, ...] = ()

    def _estimate(self, command: c.Estimate) -> None:
        model = PLAIN.get(command.model)
        kv_type = command.shape.kv_type
        if kv_type in self.refuses:
            self.fail(command, Code.FAILED_PRECONDITION, "kv_type_unsupported", "not with it")
        elif model is None:
            super()._estimate(command)
        else:
            cell_bytes = model.cell_bytes * SIXTEENTHS[kv_type] // 16
            with patch.dict(MODELS, {command.model: replace(model, cell_bytes=cell_bytes)}):
                super()._estimate(command)


def start(bench: Bench, device: str = "cpu", **options: Any) -> Worker:
    worker = Worker(bench, device, **options)
    bench.workers[worker.peer] = worker
    worker.ready()
    return worker


def ask(client: Client, model: str = "small", **fields: Any) -> bytes:
    rid: bytes = fields.pop("rid", None) or client.bench.rid()
    client.send(Fit(rid=rid, model=model, **fields))
    return rid


def report(client: Client, model: str = "small", **fields: Any) -> FitReport:
    body = client.ok(ask(client, model, **fields))
    return msgspec.convert(body, FitReport)


def by_kv(found: FitReport) -> dict[str, FitRow]:
    assert [row.kv_type for row in found.rows] == list(KV_TYPES)
    return {row.kv_type: row for row in found.rows}


# --- what it says is what REGISTER does ---------------------------------------------------------


def check_truth(client: Client, model: str, slots: int, found: FitReport) -> None:
    """Register each row's agent, and before it the next larger one."""
    for row in found.rows:
        asked = {"kv_type": row.kv_type, "device": row.device, "slots": slots}
        largest = MODELS[model].n_ctx_train
        if row.n_ctx < largest:
            more = min(largest, (row.n_ctx // 256 + 1) * 256)
            error = client.error(client.register("more", model, n_ctx=more, **asked))
            assert error.reason in (LEDGER_DENY, "quota_exceeded"), row
        if row.n_ctx:
            before = client.bench.core.report(client.bench.now_ns).devices[0].promised
            client.ok(client.register("new", model, n_ctx=row.n_ctx, **asked))
            after = client.bench.core.report(client.bench.now_ns).devices[0].promised
            assert after.promised_bytes - before.promised_bytes == row.requested_bytes
            client.ok(client.unregister("new"))
        else:
            assert row.error is not None
            assert row.error.message


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(60, 700),
    host=st.integers(1, 300),
    foreign=st.integers(0, 80),
    others=st.lists(
        st.tuples(
            st.sampled_from(["small", "other", "twin"]),
            st.sampled_from(KV_TYPES),
            st.integers(1, 3000),
            st.integers(1, 3),
        ),
        max_size=4,
    ),
    model=st.sampled_from(["small", "other", "short", "stateful"]),
    slots=st.integers(1, 3),
    mode=st.sampled_from(["reserve", "timeshare"]),
    vram_quota=st.none() | st.integers(1, 500),
    kv_quota=st.none() | st.integers(1, 100),
)
def test_what_fits_is_admitted_and_no_more_is(
    total: int,
    host: int,
    foreign: int,
    others: list[Any],
    model: str,
    slots: int,
    mode: Any,
    vram_quota: int | None,
    kv_quota: int | None,
) -> None:
    device = DeviceConfig(
        id="cpu", kind="cpu", capacity=f"{total} MiB", host_cap=f"{host} MiB", mode=mode
    )
    bench = Bench(config_of(device))
    worker = start(bench)
    client = bench.client()
    for number, (name, kv_type, n_ctx, count) in enumerate(others):
        client.register(f"a{number}", name, n_ctx=n_ctx, kv_type=kv_type, slots=count)
    worker.residency(foreign_bytes=foreign * MIB)
    quota = Quota(
        vram_bytes=None if vram_quota is None else vram_quota * MIB,
        kv_bytes=None if kv_quota is None else kv_quota * MIB,
    )
    bench.post(KeysChanged({client.principal: quota}, {}))
    loads, before = len(worker.all(c.Load)), bench.core.report(bench.now_ns)
    found = report(client, model, slots=slots)
    assert len(worker.all(c.Load)) == loads, "nothing is loaded"
    assert bench.core.report(bench.now_ns).devices == before.devices
    check_truth(client, model, slots, found)


def test_the_numbers_of_an_empty_device() -> None:
    bench = Bench()
    start(bench, total_bytes=200 * MIB, base_bytes=8 * MIB)
    found = report(bench.client(), slots=2)
    rows = by_kv(found)
    # 200 MiB - 8 MiB base - 100 MiB weights - 4 MiB compute = 88 MiB of cells.
    assert rows["f16"].n_ctx == 5632
    assert (rows["f16"].limit, rows["q4_0"].limit) == ("device", "training")
    assert rows["q4_0"].n_ctx == found.n_ctx_train == MODELS["small"].n_ctx_train
    assert (rows["f16"].pool_cells, rows["f16"].pool_slots) == (5632, 2)
    assert rows["f16"].requested_bytes == 192 * MIB
    assert rows["f16"].free_bytes == 0
    assert rows["f16"].weights_bytes == 100 * MIB
    assert rows["f16"].kv_bytes == 88 * MIB
    assert rows["f16"].compute_bytes == 4 * MIB
    assert not rows["f16"].shares_weights
    assert (found.model, found.arch, found.file_bytes) == ("small", "llama", 90 * MIB)
    (device,) = found.devices
    assert (device.cap_bytes, device.promised_bytes, device.base_bytes) == (
        200 * MIB,
        8 * MIB,
        8 * MIB,
    )
    assert (device.free_bytes, device.agents) == (192 * MIB, 0)


def test_weights_that_are_there_already_are_not_asked_for_again() -> None:
    bench = Bench()
    start(bench, total_bytes=200 * MIB)
    client = bench.client()
    client.ok(client.register("one", "twin", n_ctx=256))
    row = by_kv(report(client))["f16"]
    assert row.shares_weights
    assert row.n_ctx == 6144
    assert row.requested_bytes == 96 * MIB - MODELS["small"].pool_bytes(256) + 4 * MIB


def test_where_nothing_fits_it_says_how_much_is_missing_for_the_smallest_context() -> None:
    bench = Bench()
    start(bench, total_bytes=100 * MIB)
    for row in report(bench.client()).rows:
        assert (row.n_ctx, row.limit) == (0, "")
        assert row.error is not None
        assert row.error.details["n_ctx"] == 256
        assert row.error.details["short_by_bytes"] < 9 * MIB


def test_every_device_is_asked_and_one_without_a_worker_says_so() -> None:
    devices = [DeviceConfig(id=f"cpu:{n}", kind="cpu", capacity="1 GiB") for n in (0, 1, 2)]
    bench = Bench(config_of(*devices))
    start(bench, "cpu:0")
    small = start(bench, "cpu:1", total_bytes=150 * MIB)
    found = report(bench.client())
    assert [(row.device, row.kv_type) for row in found.rows] == [
        (f"cpu:{n}", kv_type) for n in (0, 1, 2) for kv_type in KV_TYPES
    ]
    assert [row.n_ctx for row in found.rows[:4]] == [8192, 8192, 8192, 2944 // 256 * 256]
    assert [row.error.reason for row in found.rows if row.error] == ["no_worker"] * 3
    one = report(bench.client("c2"), device="cpu:1")
    assert {row.device for row in one.rows} == {"cpu:1"}
    assert len(small.all(c.Load)) == 0


def test_a_kv_type_that_the_model_cannot_have_says_so() -> None:
    bench = Bench()
    start(bench).refuses = ("q8_0", "q4_0")
    rows = by_kv(report(bench.client()))
    assert rows["f16"].n_ctx == 8192
    assert rows["q8_0"].error is not None
    assert rows["q8_0"].error.reason == "kv_type_unsupported"


@pytest.mark.parametrize("quota", [Quota(vram_bytes=150 * MIB), Quota(kv_bytes=20 * MIB)])
def test_a_quota_limits_too(quota: Quota) -> None:
    bench = Bench()
    start(bench)
    client = bench.client()
    bench.post(KeysChanged({client.principal: quota}, {}))
    found = report(client)
    row = by_kv(found)["f16"]
    assert row.limit == "quota"
    assert row.n_ctx == (46 * 64 // 256 * 256 if quota.vram_bytes else 20 * 64)
    check_truth(client, "small", 1, found)


# --- refused, given up ----------------------------------------------------------------------------


def test_what_is_wrong_with_the_request_is_told_as_register_would() -> None:
    bench = Bench()
    client = bench.client()
    assert client.error(ask(client, device="cpu")).reason == "no_worker"
    start(bench)
    assert client.error(ask(client, "nonesuch")).reason == "no_such_model"
    assert client.error(ask(client, device="cuda:7")).reason == "no_such_device"
    assert client.error(ask(client, "")).reason == "bad_value"
    assert client.error(ask(client, slots=0)).reason == "bad_value"
    huge = report(client, "huge")
    assert {row.error.details["code"] for row in huge.rows if row.error} == {"FILE"}


def test_an_observer_may_not_ask() -> None:
    bench = Bench()
    start(bench)
    client = bench.client()
    request = Fit(rid=bench.rid(), model="small")
    bench.post(ClientMessageIn(client.peer, client.principal, True, request, "observer"))
    assert client.error(request.rid).reason == "role_denied"


def test_the_same_request_again_waits_for_the_same_answer_and_another_is_too_much() -> None:
    bench = Bench()
    worker = start(bench)
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = ask(client)
    ask(client, rid=rid)
    assert client.error(ask(client)).reason == "too_many_waiters"
    others = [bench.client(f"o{number}") for number in range(SURVEYS_MAX)]
    rids = [ask(other) for other in others[:-1]]
    assert others[-1].error(ask(others[-1])).reason == "too_many_waiters"
    worker.auto |= {c.Estimate}
    while worker.held:
        worker.answer(worker.held[0])
    assert by_kv(msgspec.convert(client.ok(rid), FitReport))["f16"].n_ctx == 8192
    for other, each in zip(others, rids, strict=False):
        other.ok(each)
    assert report(client).rows


def drained(worker: Worker) -> None:
    worker.auto |= {c.Estimate}
    while worker.held:
        worker.answer(worker.held[0])


def test_cancel_and_the_end_of_a_session_end_the_questions() -> None:
    bench = Bench()
    worker = start(bench)
    worker.auto -= {c.Estimate}
    client, other = bench.client(), bench.client("c2")
    rid = ask(client)
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code is Code.CANCELLED
    ask(other)
    other.gone()
    drained(worker)
    assert report(client).rows, "nothing is left that would be in its way"


def test_a_lost_worker_ends_it() -> None:
    bench = Bench()
    worker = start(bench)
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = ask(client)
    bench.kill(worker)
    assert client.error(rid).reason == "no_worker"


def test_shutdown_ends_it() -> None:
    bench = Bench()
    worker = start(bench)
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = ask(client)
    bench.shut_down()
    assert client.error(rid).reason == "draining"
    assert client.error(ask(client)).reason == "draining"


def test_who_comes_meanwhile_is_taken_into_account() -> None:
    bench = Bench()
    worker = start(bench, total_bytes=250 * MIB)
    client, other = bench.client(), bench.client("c2")
    worker.auto -= {c.Estimate}
    rid = ask(client)
    # Before the last answer comes, another agent takes most of the device.
    for _ in range(5):
        worker.answer(worker.held[0])
    admitted = other.register("late", "other", n_ctx=256)
    worker.answer(next(item for item in worker.held if item.model == "other"))
    other.ok(admitted)
    assert not client.got(rid, m.Ok)
    drained(worker)
    found = msgspec.convert(client.ok(rid), FitReport)
    # 250 MiB - 220 MiB weights - 4 MiB compute = 26 MiB of cells.
    assert by_kv(found)["f16"].n_ctx == 26 * 64 // 256 * 256
    check_truth(client, "small", 1, found)
