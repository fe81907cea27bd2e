"""REGISTER while the device's worker is away, or goes away in the middle of it."""

from __future__ import annotations

import msgspec
import pytest
from scripted_worker import MIB, Bench, Client, config_of

from vram_conductor.broker.events import ClientMessageIn
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import LEDGER_DENY, Code

TWO = [DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity="1 GiB") for i in range(2)]


def stages(client: Client, rid: bytes) -> list[str]:
    return [progress.stage for progress in client.got(rid, m.Progress)]


def agents(bench: Bench) -> dict[str, str]:
    return {item.agent: item.state for item in bench.core.report(bench.now_ns).agents}


def promised(bench: Bench) -> int:
    return bench.core.report(bench.now_ns).devices[0].promised.promised_bytes


# --- before the worker is there ---------------------------------------------------------------


def test_register_waits_for_the_worker_and_says_so() -> None:
    bench = Bench()
    client = bench.client()
    rid = client.register("coder")
    bench.advance(10_000)
    assert client.silent(rid)
    assert stages(client, rid) == ["worker"]
    assert "cpu" in client.got(rid, m.Progress)[0].note
    bench.worker()
    assert client.ok(rid)["state"] == "ready"
    assert stages(client, rid) == ["worker", "estimate", "load"]


def test_register_does_not_wait_for_ever() -> None:
    bench = Bench(config_of(worker_wait_ms=4_000))
    client = bench.client()
    rid = client.register("coder")
    bench.advance(3_500)
    assert client.silent(rid)
    bench.advance(1_000)
    error = client.error(rid)
    assert (error.code, error.reason, error.retryable) == (Code.UNAVAILABLE, "no_worker", True)
    assert "conductor worker --device cpu" in error.message
    bench.worker()
    assert not agents(bench)
    client.ok(client.register("coder"))


def test_waiting_can_be_switched_off() -> None:
    bench = Bench(config_of(worker_wait_ms=0))
    client = bench.client()
    rid = client.register("coder")
    assert client.error(rid).reason == "no_worker"
    assert not stages(client, rid)


def test_device_that_no_worker_can_bring_is_not_waited_for() -> None:
    client = Bench().client()
    assert client.error(client.register("coder", device="cuda:7")).reason == "no_such_device"


def test_any_worker_will_do_where_no_device_is_configured() -> None:
    bench = Bench(msgspec.structs.replace(config_of(), device=[]))
    client = bench.client()
    rid = client.register("coder")
    assert stages(client, rid) == ["worker"]
    bench.worker("cuda:0", kind="cuda")
    assert client.ok(rid)["device"] == "cuda:0"


def test_worker_of_another_device_is_not_the_one_waited_for() -> None:
    bench = Bench(config_of(*TWO))
    client = bench.client()
    wanted, anywhere = client.register("a", device="cpu:1"), client.register("b")
    bench.worker("cpu:0")
    assert client.ok(anywhere)["device"] == "cpu:0"
    assert client.silent(wanted)
    bench.worker("cpu:1")
    assert client.ok(wanted)["device"] == "cpu:1"


def test_waiting_register_can_be_cancelled() -> None:
    bench = Bench()
    client = bench.client()
    rid, other = client.register("coder"), client.register("writer", "other")
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code == Code.CANCELLED
    worker = bench.worker()
    client.ok(other)
    assert [load.agent.agent for load in worker.all(c.Load)] == ["writer"]
    bench.advance(20_000)
    assert client.error(rid).code == Code.CANCELLED


def test_nobody_else_can_cancel_it() -> None:
    bench = Bench()
    client = bench.client()
    rid = client.register("coder")
    for message in (m.Hello(v=(1, 0)), m.Cancel(rid=rid)):
        bench.post(ClientMessageIn(b"other", "somebody", same_user_ipc=False, message=message))
    assert bench.inbox[b"other"][-1].error.reason == "unknown_rid"
    assert client.silent(rid)


def test_register_of_a_client_that_left_is_forgotten() -> None:
    bench = Bench()
    client = bench.client()
    client.register("coder")
    client.gone()
    worker = bench.worker()
    assert not worker.all(c.Estimate)
    assert not agents(bench)


def test_repeated_register_waits_once_and_two_clients_get_one_load() -> None:
    bench = Bench()
    one, two = bench.client("c1"), bench.client("c2")
    first = one.register("coder")
    one.register("coder", rid=first)
    assert stages(one, first) == ["worker"]
    second, differs = two.register("coder"), two.register("coder", n_ctx=256)
    worker = bench.worker()
    assert one.ok(first) == two.ok(second)
    assert two.error(differs).reason == "agent_exists"
    assert len(worker.all(c.Load)) == 1


def test_unregister_takes_back_what_waits() -> None:
    bench = Bench()
    client = bench.client()
    rid = client.register("coder")
    client.ok(client.unregister("coder"))
    assert client.error(rid).reason == "agent_removed"
    bench.worker()
    assert not agents(bench)
    assert client.error(client.unregister("coder")).reason == "no_such_agent"


def test_drain_ends_what_waits() -> None:
    bench = Bench()
    client = bench.client()
    rid = client.register("coder")
    bench.shut_down()
    assert client.error(rid).reason == "draining"


def test_waiting_registers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram_conductor.broker.agents.lobby.GUESTS_MAX", 2)
    bench = Bench()
    client = bench.client()
    first, second, third = (client.register(name) for name in ("a", "b", "d"))
    assert client.error(third).reason == "too_many_waiters"
    bench.worker()
    client.ok(first)
    client.ok(second)


def test_agents_that_come_back_are_loaded_before_those_that_wait() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("old"))
    late = bench.restart()
    again = late.client()
    rid = again.register("new", "other")
    worker = late.worker(epoch=2, total_bytes=150 * MIB)
    assert agents(late) == {"old": "ready"}
    assert again.error(rid).reason == LEDGER_DENY
    assert [load.agent.agent for load in worker.all(c.Load)] == ["old"]


# --- when the worker is lost in the middle ----------------------------------------------------


@pytest.mark.parametrize("stage", [c.Estimate, c.Load])
def test_registration_starts_over_with_the_next_worker(stage: type) -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {stage}
    one, two = bench.client("c1"), bench.client("c2")
    first, second = one.register("coder"), two.register("coder")
    bench.kill(worker)
    assert promised(bench) == 0
    assert one.silent(first)
    assert stages(one, first)[-1] == "worker"
    new = bench.worker(epoch=2)
    assert one.ok(first) == two.ok(second)
    assert len(new.all(c.Load)) == 1


@pytest.mark.parametrize("stage", [c.Estimate, c.Load])
def test_registration_starts_over_once(stage: type) -> None:
    bench = Bench()
    client = bench.client()
    worker = bench.worker(ready=False)
    worker.auto -= {stage}
    worker.ready()
    rid = client.register("coder")
    bench.kill(worker)
    second = bench.worker(epoch=2, ready=False)
    second.auto -= {stage}
    second.ready()
    assert second.waiting(stage)
    bench.kill(second)
    error = client.error(rid)
    assert (error.code, error.reason, error.retryable) == (Code.UNAVAILABLE, "worker_lost", True)
    assert promised(bench) == 0


def test_registration_whose_worker_does_not_come_back_ends() -> None:
    bench = Bench(config_of(worker_wait_ms=4_000))
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    bench.kill(worker)
    bench.advance(4_500)
    assert client.error(rid).reason == "no_worker"


def test_registration_that_starts_over_can_be_cancelled() -> None:
    bench = Bench()
    worker = bench.worker()
    worker.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    bench.kill(worker)
    client.send(m.Cancel(rid=rid))
    assert client.error(rid).code == Code.CANCELLED
    bench.worker(epoch=2)
    assert not agents(bench)


def test_registration_starts_over_on_another_device() -> None:
    bench = Bench(config_of(*TWO))
    lost, other = bench.worker("cpu:0"), bench.worker("cpu:1")
    lost.auto -= {c.Load}
    client = bench.client()
    rid = client.register("coder")
    assert lost.waiting(c.Load)
    bench.kill(lost)
    assert client.ok(rid)["device"] == "cpu:1"
    assert other.all(c.Load)


# --- suspended agents -------------------------------------------------------------------------


def suspended() -> tuple[Bench, Client]:
    """A new broker whose worker has become too small for the agent of the old one."""
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("coder"))
    late = bench.restart()
    late.worker(epoch=2, total_bytes=50 * MIB)
    assert agents(late) == {"coder": "suspended"}
    return late, late.client()


def test_register_of_a_suspended_agent_waits_for_the_worker_too() -> None:
    bench, client = suspended()
    bench.kill(next(iter(bench.workers.values())))
    rid = client.register("coder")
    assert client.silent(rid)
    bench.worker(epoch=3)
    assert client.ok(rid)["state"] == "ready"


def test_register_of_an_agent_on_its_way_back_tells_what_comes_of_it() -> None:
    bench, client = suspended()
    bench.kill(next(iter(bench.workers.values())))
    worker = bench.worker(epoch=3, total_bytes=50 * MIB, ready=False)
    worker.auto -= {c.Estimate}
    worker.ready()
    assert agents(bench) == {"coder": "loading"}
    rid = client.register("coder")
    assert client.silent(rid)
    worker.answer(worker.waiting(c.Estimate))
    assert client.error(rid).reason == LEDGER_DENY


def test_register_that_waits_for_a_return_can_be_cancelled() -> None:
    bench, client = suspended()
    bench.kill(next(iter(bench.workers.values())))
    worker = bench.worker(epoch=3, ready=False)
    worker.auto -= {c.Load}
    worker.ready()
    one, two = bench.client("one"), bench.client("two")
    first, second = one.register("coder"), two.register("coder")
    assert stages(one, first) == ["load"]
    one.send(m.Cancel(rid=first))
    assert one.error(first).code == Code.CANCELLED
    worker.answer(worker.waiting(c.Load))
    assert two.ok(second)["state"] == "ready"
    assert client.ok(client.register("coder"))["state"] == "ready"


def test_agent_whose_worker_dies_on_the_way_back_waits_like_the_others() -> None:
    bench, client = suspended()
    bench.kill(next(iter(bench.workers.values())))
    worker = bench.worker(epoch=3, ready=False)
    worker.auto -= {c.Estimate}
    worker.ready()
    rid = client.register("coder")
    bench.kill(worker)
    assert client.ok(rid)["state"] == "waiting"


def test_all_agents_of_a_device_that_is_not_configured_any_more_are_suspended() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    for agent in ("coder", "writer"):
        client.ok(client.register(agent))
    bench.config = config_of(DeviceConfig(id="cpu:1", kind="cpu", capacity="1 GiB"))
    late = bench.restart()
    assert agents(late) == {"coder": "suspended", "writer": "suspended"}
    again = late.client()
    assert again.error(again.register("coder")).reason == "device_not_configured"
    assert again.error(again.register("more", device="cpu")).reason == "no_such_device"
