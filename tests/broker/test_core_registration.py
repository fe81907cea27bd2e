"""REGISTER in the core: estimate → reserve → load → commit, and back at every failure."""

from __future__ import annotations

import pytest
from scripted_worker import MIB, MODELS, PRINCIPAL, Bench, ScriptedWorker, config_of, shape_of

from vram_conductor.broker.events import ClientMessageIn
from vram_conductor.broker.journal.records import AgentRegistered, AgentRemoved
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.status import StatusReport
from vram_conductor.protocol.values import KVType, Memory, Sampling


def report(bench: Bench) -> StatusReport:
    return bench.core.report(bench.now_ns)


def promised(bench: Bench, device: int = 0) -> int:
    return report(bench).devices[device].promised.promised_bytes


def holding(bench: Bench, worker: ScriptedWorker, *kinds: type) -> None:
    worker.auto -= set(kinds)


# --- the good way -----------------------------------------------------------------------------


def test_register_estimates_reserves_loads_and_answers_with_the_numbers() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    rid = client.register("coder", n_ctx=1000)
    body = client.ok(rid)
    small = MODELS["small"]
    assert body["agent"] == "coder"
    assert body["model"] == "small"
    assert body["model_id"] == "m-small"
    assert body["device"] == "cpu"
    assert body["n_ctx"] == 1000
    assert body["weights_bytes"] == small.weights_bytes
    assert body["pool_bytes"] == small.pool_bytes(1024)
    assert body["state_bytes"] == 1000 * small.cell_bytes
    assert body["unmeasured"] is False
    assert body["shared_with"] == []
    assert body["rollback"] == "any"
    assert promised(bench) == small.weights_bytes + small.pool_bytes(1024)
    load = worker.all(c.Load)[0]
    assert load.shape == shape_of(1000)
    assert load.budget_bytes == 1024 * MIB
    assert [type(record) for record in bench.records if isinstance(record, AgentRegistered)]
    assert [p.stage for p in client.got(rid, m.Progress)] == ["estimate", "load"]


def test_n_ctx_defaults_to_the_configuration() -> None:
    bench = Bench(config_of(default_n_ctx=2048))
    bench.worker()
    client = bench.client()
    assert client.ok(client.register("coder", n_ctx=None))["n_ctx"] == 2048


def test_two_agents_of_one_file_share_the_weights() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("coder", "small"))
    body = client.ok(client.register("reviewer", "twin"))
    assert body["shared_with"] == ["local/coder"]
    small = MODELS["small"]
    # One copy of the weights, one pool: the second agent asks for nothing more.
    assert promised(bench) == small.weights_bytes + small.pool_bytes(1024)
    assert len(worker.all(c.Load)) == 2
    bench_agents = {agent.agent: agent.state for agent in report(bench).agents}
    assert bench_agents == {"coder": "ready", "reviewer": "ready"}
    client.ok(client.unregister("coder"))
    assert promised(bench) == small.weights_bytes + small.pool_bytes(1024)
    assert [agent.agent for agent in report(bench).agents] == ["reviewer"]


def test_another_n_ctx_on_the_same_model_reloads_nothing() -> None:
    bench = Bench(config_of(default_n_ctx=512))
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("large", n_ctx=4096))
    client.ok(client.register("unset", n_ctx=None))
    loads = worker.all(c.Load)
    assert [load.agent.agent for load in loads] == ["large", "unset"]
    assert loads[0].shape == loads[1].shape == shape_of(4096)
    assert loads[1].n_ctx == 512
    for agent in ("large", "unset", "large", "unset"):
        rid = client.decode(agent)
        worker.finish(worker.job(agent))
        client.done(rid)
    assert len(worker.all(c.Load)) == 2
    assert not worker.all(c.Unload)


def test_same_request_again_is_the_same_answer() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    first = client.ok(client.register("coder"))
    assert client.ok(client.register("coder")) == first
    assert len(worker.all(c.Load)) == 1


def test_right_to_name_a_path_is_no_parameter_of_the_agent() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    for message in (
        m.Hello(v=(1, 0)),
        m.Register(rid=bench.rid(), agent="coder", model="small", n_ctx=1024),
    ):
        bench.post(ClientMessageIn(b"tcp", PRINCIPAL, same_user_ipc=False, message=message))
    assert isinstance(bench.inbox[b"tcp"][-1], m.Ok)
    assert len(worker.all(c.Load)) == 1


def test_other_parameters_are_refused_with_the_differences() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    error = client.error(client.register("coder", n_ctx=2048, sampling=Sampling(temperature=0.0)))
    assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "agent_exists")
    assert error.details["differences"]["n_ctx"] == [1024, 2048]
    assert set(error.details["differences"]) == {"n_ctx", "sampling"}


def test_concurrent_registers_of_one_name_get_one_load_and_the_same_answer() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    one, two = bench.client("c1"), bench.client("c2")
    first, second = one.register("coder"), two.register("coder")
    differs = two.register("coder", n_ctx=256)
    assert one.silent(first)
    assert two.silent(second)
    assert two.error(differs).reason == "agent_exists"
    worker.answer(worker.waiting(c.Load))
    assert one.ok(first) == two.ok(second)
    assert len(worker.all(c.Load)) == 1


# --- denied -----------------------------------------------------------------------------------


def test_deny_sends_no_load_and_hints_at_the_largest_context() -> None:
    bench = Bench()
    worker = bench.worker(total_bytes=200 * MIB)
    client = bench.client()
    before = promised(bench)
    error = client.error(client.register("coder", n_ctx=8192))
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, LEDGER_DENY)
    assert error.details["code"] == "CAP"
    assert error.details["ledger_max_bytes"] == 200 * MIB
    assert not worker.all(c.Load)
    assert promised(bench) == before
    fits = error.details["largest_n_ctx_that_fits"]
    # 200 MiB - 100 MiB weights - 4 MiB compute = 96 MiB = 6144 cells of 16 KiB.
    assert fits == 6144
    assert client.error(client.register("coder", n_ctx=fits + 1)).reason == LEDGER_DENY
    client.ok(client.register("coder", n_ctx=fits))


def test_second_registration_sees_the_bytes_promised_to_one_that_is_still_loading() -> None:
    bench = Bench()
    worker = bench.worker(total_bytes=250 * MIB)
    worker.auto -= {c.Load}
    client = bench.client()
    first = client.register("coder", "small", n_ctx=1024)
    second = client.register("writer", "other", n_ctx=1024)
    # 100 + 20 promised, 120 more weights and the same pool fit into 250; a third model does not.
    third = client.register("judge", "small", n_ctx=4096)
    error = client.error(third)
    assert error.reason == LEDGER_DENY
    held = MODELS["small"].weights_bytes + MODELS["other"].weights_bytes
    assert error.details["ledger_allocated_bytes"] == held + MODELS["small"].pool_bytes(1024)
    for load in list(worker.held):
        worker.answer(load)
    client.ok(first)
    client.ok(second)
    assert len(worker.all(c.Load)) == 2


def test_file_larger_than_the_cap_is_denied_by_its_size_alone() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    error = client.error(client.register("giant", "huge"))
    assert error.reason == LEDGER_DENY
    assert error.details["code"] == "FILE"
    assert error.details["requested_bytes"] == MODELS["huge"].file_bytes
    # No context makes the file smaller.
    assert error.details["largest_n_ctx_that_fits"] == 0
    assert "largest_n_ctx=0" in error.message
    assert not worker.all(c.Load)


def test_foreign_bytes_deny_and_admit_again_when_they_are_gone() -> None:
    bench = Bench()
    worker = bench.worker(total_bytes=200 * MIB)
    client = bench.client()
    worker.residency(foreign_bytes=150 * MIB)
    assert worker.all(c.Budget)[-1].budget_bytes == 50 * MIB
    error = client.error(client.register("coder"))
    assert error.details["foreign_bytes"] == 150 * MIB
    assert error.retryable
    worker.residency(foreign_bytes=0)
    assert worker.all(c.Budget)[-1].budget_bytes == 200 * MIB
    client.ok(client.register("coder"))


def test_stale_sample_is_a_deny() -> None:
    bench = Bench(config_of(sample_max_age_ms=1000))
    worker = bench.worker()
    client = bench.client()
    bench.now_ns += 1_500_000_000
    error = client.error(client.register("coder"))
    assert error.details["code"] == "STALE_SAMPLE"
    assert error.retryable
    worker.residency()
    client.ok(client.register("coder"))


def test_age_of_a_sample_counts_from_when_it_was_taken() -> None:
    bench = Bench(config_of(sample_max_age_ms=3000))
    worker = bench.worker(ready=False)
    memory = Memory(used_bytes=0, own_bytes=0, foreign_bytes=0, age_ms=2500)
    worker.ready(memory=memory)
    client = bench.client()
    bench.now_ns += 1_000_000_000
    assert client.error(client.register("coder")).details["code"] == "STALE_SAMPLE"


def test_host_memory_for_parked_states_limits_too() -> None:
    device = DeviceConfig(id="cpu", kind="cpu", capacity="1 GiB", host_cap="40 MiB")
    bench = Bench(config_of(device))
    worker = bench.worker()
    client = bench.client()
    error = client.error(client.register("coder", n_ctx=4096))
    assert error.details["code"] == "HOST"
    fits = error.details["largest_n_ctx_that_fits"]
    assert fits == 1280
    assert not worker.all(c.Load)
    client.ok(client.register("coder", n_ctx=fits))


def test_hint_is_right_where_a_part_of_the_state_is_fixed() -> None:
    device = DeviceConfig(id="cpu", kind="cpu", capacity="1 GiB", host_cap="40 MiB")
    bench = Bench(config_of(device))
    bench.worker()
    client = bench.client()
    error = client.error(client.register("coder", "stateful", n_ctx=4096))
    # 8 MiB fixed + 16 KiB per token: 768 tokens are 20 MiB, and as much to write it.
    # In proportion it would be 1138.
    fits = error.details["largest_n_ctx_that_fits"]
    assert fits == 768
    client.ok(client.register("coder", "stateful", n_ctx=fits))


# --- failing ----------------------------------------------------------------------------------


def test_no_estimate_is_no_admission() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = client.register("coder")
    worker.fail(worker.waiting(c.Estimate), Code.INTERNAL, "estimate_failed", "odd tensors")
    error = client.error(rid)
    assert error.reason == LEDGER_DENY
    assert error.details["code"] == "NO_ESTIMATE"
    assert not worker.all(c.Load)
    assert promised(bench) == 0


def test_unknown_model_is_the_requests_own_mistake() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    assert client.error(client.register("coder", "nonesuch")).reason == "no_such_model"
    assert client.error(client.register("coder", n_ctx=9000)).reason == "n_ctx_beyond_training"
    assert not worker.all(c.Load)


def test_estimate_that_never_comes_is_a_deny() -> None:
    bench = Bench(config_of(estimate_timeout_ms=2000))
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    rid = client.register("coder")
    late = worker.waiting(c.Estimate)
    bench.advance(2500)
    assert client.error(rid).details["code"] == "NO_ESTIMATE"
    worker.answer(late)
    assert not worker.all(c.Load)


def test_failed_load_leaves_no_trace() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    before = report(bench).devices[0].promised
    worker.auto -= {c.Load}
    rid = client.register("writer", "other", n_ctx=2048)
    assert promised(bench) > before.promised_bytes
    worker.fail(worker.waiting(c.Load), Code.INTERNAL, "load_failed", "short file")
    assert client.error(rid).reason == "load_failed"
    assert report(bench).devices[0].promised == before
    assert worker.all(c.Unload)[-1].agent.agent == "writer"
    assert not any(
        isinstance(record, AgentRegistered) and record.agent.agent == "writer"
        for record in bench.records
    )


def test_load_that_takes_more_than_it_said_and_does_not_fit_is_undone() -> None:
    bench = Bench()
    worker = bench.worker(total_bytes=150 * MIB)
    worker.loaded_sizes = {"weights_bytes": 140 * MIB}
    client = bench.client()
    error = client.error(client.register("coder"))
    assert error.reason == LEDGER_DENY
    assert error.details["code"] == "MEASURED"
    assert promised(bench) == 0
    assert worker.all(c.Unload)


def test_load_timeout_rolls_back_and_a_late_answer_is_stale() -> None:
    bench = Bench(config_of(load_timeout_ms=3000))
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    late = worker.waiting(c.Load)
    bench.advance(3500)
    assert client.error(rid).reason == "worker_timeout"
    assert promised(bench) == 0
    worker.answer(late)
    assert not report(bench).agents


def test_worker_lost_while_loading_rolls_back() -> None:
    bench = Bench(config_of(worker_wait_ms=0))
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    bench.kill(worker)
    error = client.error(rid)
    assert (error.reason, error.retryable) == ("worker_lost", True)
    assert promised(bench) == 0
    bench.worker(epoch=2)
    client.ok(client.register("coder"))


def test_no_worker_says_what_to_do() -> None:
    bench = Bench(config_of(worker_wait_ms=0))
    client = bench.client()
    error = client.error(client.register("coder"))
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "no_worker")
    assert error.message == (
        "device 'cpu' has no worker now: if `conductor up` runs, its terminal or log says why; "
        "else start it, or `conductor worker --device cpu`; then try again"
    )
    assert client.error(client.register("coder", device="cuda:7")).reason == "no_such_device"


@pytest.mark.parametrize("stage", [c.Estimate, c.Load])
def test_cancel_while_registering_releases_everything(stage: type) -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {stage}
    client = bench.client()
    rid = client.register("coder")
    late = worker.held[0]
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code == Code.CANCELLED
    assert promised(bench) == 0
    assert not report(bench).agents
    worker.answer(late)
    assert promised(bench) == 0
    worker.auto.add(stage)
    client.ok(client.register("coder"))


def test_cancel_of_one_of_two_waiters_goes_on_for_the_other() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    one, two = bench.client("c1"), bench.client("c2")
    first, second = one.register("coder"), two.register("coder")
    one.send(m.Cancel(rid=first))
    assert one.error(first).code == Code.CANCELLED
    worker.answer(worker.waiting(c.Load))
    two.ok(second)


def test_cancel_during_the_fit_probe_ends_the_registration() -> None:
    bench = Bench()
    worker = bench.worker(total_bytes=110 * MIB)
    client = bench.client()
    worker.auto -= {c.Estimate}
    rid = client.register("coder")
    worker.answer(worker.waiting(c.Estimate))
    assert worker.waiting(c.Estimate).fit_bytes is not None
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code == Code.CANCELLED
    worker.answer(worker.waiting(c.Estimate))
    assert client.error(rid).code == Code.CANCELLED


def test_unregister_while_registering_ends_both_requests() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    client.ok(client.unregister("coder"))
    assert client.error(rid).reason == "agent_removed"
    assert promised(bench) == 0


def test_agent_of_a_vanished_client_stays_registered() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    client.register("coder")
    client.gone()
    worker.answer(worker.waiting(c.Load))
    assert [agent.agent for agent in report(bench).agents] == ["coder"]


def test_ephemeral_registration_of_a_vanished_client_is_given_up() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    client.register("coder", ephemeral=True)
    client.gone()
    worker.answer(worker.waiting(c.Load))
    assert not report(bench).agents
    assert promised(bench) == 0


def test_ephemeral_registration_goes_on_while_another_client_waits_for_it() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    one, two = bench.client("c1"), bench.client("c2")
    one.register("temp", ephemeral=True)
    second = two.register("temp", ephemeral=True)
    one.gone()
    worker.answer(worker.waiting(c.Load))
    two.ok(second)


def test_waiters_of_one_registration_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.broker.agents.lobby.WAITERS_MAX", 2)
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    first, second, third = (client.register("coder") for _ in range(3))
    assert client.error(third).reason == "too_many_waiters"
    worker.answer(worker.waiting(c.Load))
    client.ok(first)
    client.ok(second)


# --- shapes and devices -----------------------------------------------------------------------


def test_estimate_is_repeated_when_the_pool_grew_meanwhile() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Estimate}
    client = bench.client()
    first = client.register("a", n_ctx=1024, slots=2)
    second = client.register("b", n_ctx=2048)
    one, two = list(worker.held)
    worker.answer(one)
    client.ok(first)
    worker.answer(two)
    again = worker.waiting(c.Estimate)
    assert (again.shape.cells, again.shape.slots) == (3072, 2)
    worker.answer(again)
    client.ok(second)
    assert promised(bench) == 100 * MIB + MODELS["small"].pool_bytes(3072)


def test_full_device_is_merely_full() -> None:
    devices = [DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity="1 GiB") for i in range(3)]
    bench = Bench(config_of(*devices))
    sizes = {"cpu:0": 50 * MIB, "cpu:1": 400 * MIB, "cpu:2": 130 * MIB}
    for name, size in sizes.items():
        bench.worker(name, total_bytes=size)
    client = bench.client()
    # Best fit: the one with the fewest bytes left that still holds it.
    assert client.ok(client.register("a", "small"))["device"] == "cpu:2"
    assert client.ok(client.register("b", "other"))["device"] == "cpu:1"
    # One copy of the weights is preferred.
    assert client.ok(client.register("c", "small", n_ctx=512))["device"] == "cpu:2"
    error = client.error(client.register("d", "small", device="cpu:0"))
    assert error.details["device"] == "cpu:0"
    error = client.error(client.register("e", "huge"))
    assert {item["device"] for item in error.details["devices"]} == set(sizes)


def test_refusal_by_several_devices_hints_at_the_largest_context_of_each() -> None:
    devices = [DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity="1 GiB") for i in range(4)]
    bench = Bench(config_of(*devices))
    for name, size in (("cpu:0", 120), ("cpu:1", 200), ("cpu:2", 50)):
        bench.worker(name, total_bytes=size * MIB)
    client = bench.client()
    error = client.error(client.register("coder", n_ctx=8192))
    rows = {row["device"]: row for row in error.details["devices"]}
    # 16 KiB a cell, beside 100 MiB of weights and 4 of compute buffers.
    largest = {name: row["largest_n_ctx_that_fits"] for name, row in rows.items()}
    assert largest == {"cpu:0": 1024, "cpu:1": 6144, "cpu:2": 0, "cpu:3": None}
    assert "n_ctx=1024" in rows["cpu:0"]["hint"]
    # The fourth may be large enough; it has no worker now.
    assert (rows["cpu:3"]["code"], rows["cpu:3"]["never_fits"]) == ("NO_DEVICE", False)
    assert error.retryable
    assert error.details["device"] == "cpu:1"
    assert client.ok(client.register("coder", n_ctx=6144))["device"] == "cpu:1"


def test_what_fits_on_no_device_that_was_asked_may_fit_on_one_that_was_not() -> None:
    devices = [DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity="1 GiB") for i in range(2)]
    bench = Bench(config_of(*devices))
    bench.worker("cpu:0", total_bytes=95 * MIB)
    client = bench.client()
    error = client.error(client.register("coder"))
    assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    assert [row["code"] for row in error.details["devices"]] == ["CAP", "NO_DEVICE"]
    assert client.error(client.register("coder", device="cpu:0")).code is Code.OUT_OF_RANGE
    bench.worker("cpu:1")
    assert client.ok(client.register("coder"))["device"] == "cpu:1"


def test_cancel_during_the_probes_of_several_devices() -> None:
    devices = [DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity="1 GiB") for i in range(2)]
    bench = Bench(config_of(*devices))
    workers = [bench.worker(item.id, total_bytes=110 * MIB) for item in devices]
    client = bench.client()
    for worker in workers:
        worker.auto -= {c.Estimate}
    rid = client.register("coder")
    for worker in workers:
        worker.answer(worker.waiting(c.Estimate))
    probes = [worker.waiting(c.Estimate) for worker in workers]
    assert all(probe.fit_bytes is not None for probe in probes)
    workers[0].answer(probes[0])
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code == Code.CANCELLED
    workers[1].answer(probes[1])
    bench.kill(workers[0])
    assert client.error(rid).code == Code.CANCELLED


def test_kv_types_of_one_model_have_pools_of_their_own() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    kinds: tuple[KVType, ...] = ("f16", "q8_0")
    for kv_type in kinds:
        client.ok(client.register(f"a-{kv_type}", kv_type=kv_type))
    keys = {line.key for line in report(bench).devices[0].promised.lines}
    assert {"pool:m-small@f16", "pool:m-small@q8_0", "weights:m-small"} <= keys


# --- leaving ----------------------------------------------------------------------------------


def test_unregister_frees_the_bytes_and_answers_when_the_worker_has_done_it() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    worker.auto -= {c.Unload}
    rid = client.unregister("coder")
    assert client.silent(rid)
    assert promised(bench) == 0
    assert worker.waiting(c.Unload).shape is None
    worker.answer(worker.waiting(c.Unload))
    client.ok(rid)
    assert any(isinstance(record, AgentRemoved) for record in bench.records)
    assert client.error(client.unregister("coder")).reason == "no_such_agent"


def test_unload_names_the_pool_that_is_left() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("small-one", n_ctx=1024))
    client.ok(client.register("big-one", n_ctx=4096))
    client.ok(client.unregister("big-one"))
    assert worker.all(c.Unload)[-1].shape == shape_of(1024)


def test_ephemeral_agent_goes_with_the_last_session_that_wanted_it() -> None:
    bench = Bench()
    worker = bench.worker()
    one, two = bench.client("c1"), bench.client("c2")
    one.ok(one.register("temp", ephemeral=True))
    two.ok(two.register("temp", ephemeral=True))
    two.decode("temp")
    worker.finish(worker.job("temp"))
    one.gone(dead=True)
    assert [agent.agent for agent in report(bench).agents] == ["temp"]
    two.send(m.Bye())
    assert not report(bench).agents
    assert promised(bench) == 0
    assert worker.all(c.Unload)
    assert not bench.restart().core.report(bench.now_ns).agents


def test_ttl_does_not_remove_an_agent_with_a_long_job() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ttl_s=5))
    rid = client.decode("temp")
    worker.start(worker.job("temp"))
    bench.advance(12_000)
    worker.finish(worker.job("temp"))
    client.done(rid)
    assert report(bench).agents


def test_ttl_removes_an_idle_agent_but_not_one_that_is_used() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ttl_s=10))
    bench.advance(6_000)
    rid = client.decode("temp")
    bench.advance(6_000)
    worker.finish(worker.job("temp"))
    client.done(rid)
    bench.advance(9_000)
    assert report(bench).agents
    bench.advance(3_000)
    assert not report(bench).agents
    assert promised(bench) == 0
