"""Principals who share a device: what each is told of the others."""

from __future__ import annotations

import msgspec
import pytest
from scripted_worker import MIB, Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.ledger.tenants import own_lines, own_names
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.status import StatusReport
from vram_conductor.protocol.values import Line, Swap

SECRET = "somebody"


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ([], []),
        (["local/coder/main", "pool:m@f16"], ["local/coder/main", "pool:m@f16"]),
        (["somebody/x/main"], ["1 other"]),
        (
            ["somebody/x/a", "weights:m", "else/y/b", "local/c/d"],
            ["weights:m", "local/c/d", "2 others"],
        ),
        (["local2/x/main", "locally/x/main"], ["2 others"]),
    ],
)
def test_names_of_others_are_counted(names: list[str], shown: list[str]) -> None:
    assert own_names(names, "local") == shown


def test_lines_of_others_are_summed_up() -> None:
    lines = [
        Line("weights:m", 5),
        Line("state:somebody/x", 7),
        Line("state:local/a", 1),
        Line("parked:else/y/main", 2),
        Line("state:else/y", 3),
    ]
    assert own_lines(lines, "local") == [
        Line("weights:m", 5),
        Line("state:local/a", 1),
        Line("state:others", 10, detail="2 others"),
        Line("parked:others", 2, detail="1 other"),
    ]
    assert own_lines(lines, None) == lines


def two(host_cap: str = "1 GiB") -> tuple[Bench, ScriptedWorker, Client, Client]:
    bench = Bench(
        config_of(DeviceConfig(id="cpu", kind="cpu", capacity="1 GiB", host_cap=host_cap))
    )
    worker = bench.worker()
    mine, other = bench.client("mine"), bench.client("other", SECRET)
    mine.ok(mine.register("coder"))
    other.ok(other.register("secret-plan"))
    return bench, worker, mine, other


def test_receipt_does_not_name_the_conversations_of_others() -> None:
    _bench, worker, mine, _other = two()
    rid = mine.decode("coder")
    job = worker.job("coder")
    worker.start(job)
    worker.tokens(job, "a", [10])
    evicted = ["somebody/secret-plan/main", "local/coder/side", "pool:m-other@f16"]
    worker.done(job, swap=Swap(evicted=evicted, restored=True, bytes=5, ms=2.0))
    assert mine.done(rid).swap == Swap(
        evicted=["local/coder/side", "pool:m-other@f16", "1 other"], restored=True, bytes=5, ms=2.0
    )


def test_many_agents_on_the_same_weights_are_counted_for_each_other() -> None:
    bench = Bench(config_of(DeviceConfig(id="cpu", kind="cpu", capacity="1 GiB")))
    bench.worker()
    client = bench.client()
    for number in range(40):
        client.ok(client.register(f"a{number}", n_ctx=256))
    rid = bench.rid()
    client.send(m.Status(rid=rid))
    agents = msgspec.convert(client.ok(rid), StatusReport).agents
    assert len(agents) == 40
    for agent in agents:
        *names, more = agent.shared_with
        assert (len(set(names)), more) == (16, "23 others")
        assert f"local/{agent.agent}" not in names


def test_status_does_not_name_the_agents_of_others() -> None:
    bench, worker, mine, other = two()
    worker.residency(host_lines=[Line("parked:somebody/secret-plan/main", 9)])
    rid = bench.rid()
    mine.send(m.Status(rid=rid))
    body = mine.ok(rid)
    assert "secret-plan" not in str(body)
    report = msgspec.convert(body, StatusReport)
    assert report.devices[0].parked == [Line("parked:others", 9, detail="1 other")]
    assert {line.key for line in report.devices[0].host.lines} == {
        "spare",
        "state:local/coder",
        "state:others",
    }
    assert report.agents[0].shared_with == ["1 other"]
    other.send(m.Status(rid=rid))
    assert "secret-plan" in str(other.ok(rid))
    # The operator sees everything.
    assert "secret-plan" in str(msgspec.to_builtins(bench.core.report(bench.now_ns).devices))


def test_refusal_does_not_name_the_agents_of_others() -> None:
    _bench, _worker, mine, _other = two("70 MiB")
    error = mine.error(mine.register("large", n_ctx=4096))
    assert error.details["code"] == "HOST"
    assert "secret-plan" not in str(error)
    lines = {line["key"]: line["bytes"] for line in error.details["lines"]}
    assert lines.pop("spare") > 0
    assert lines == {"state:local/coder": 16 * MIB, "state:others": 16 * MIB}
