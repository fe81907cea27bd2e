"""``conductor drain``: whom it sends away, what it shows, and what it does not do twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from scripted_broker import Peer, ScriptedBroker

from vram_conductor.client import AsyncConductor, Conductor, cli
from vram_conductor.protocol.drain import HOLD_MS, DrainDevice, DrainReceipt
from vram_conductor.protocol.errors import ConductorError, InvalidArgument
from vram_conductor.protocol.messages import Ok, Progress, Status
from vram_conductor.protocol.status import (
    DeviceStatus,
    LedgerStatus,
    StatusReport,
    WorkerStatus,
)

EMPTY = LedgerStatus(cap_bytes=1)
LEFT = DrainReceipt(
    device="cpu",
    worker="cpu@box",
    worker_epoch=7,
    pid=42,
    host="box",
    version="0.1.0",
    build="old-1",
    finished=2,
    cut_off=1,
    waiting=3,
    ms=1500,
)


def worker(epoch: int) -> WorkerStatus:
    return WorkerStatus(
        worker="w", worker_epoch=epoch, pid=epoch, host="box", version="0.2.0", build=f"lib-{epoch}"
    )


def device(name: str = "cpu", epoch: int | None = 7) -> DeviceStatus:
    serving = None if epoch is None else worker(epoch)
    return DeviceStatus(device=name, kind="cpu", promised=EMPTY, host=EMPTY, worker=serving)


def play(broker: ScriptedBroker, *devices: DeviceStatus, after: int | None = 8) -> None:
    """The devices, until the worker of the first has left; ``after`` then serves it."""
    now = [list(devices)]

    def status(peer: Peer, message: Status) -> None:
        report = StatusReport(broker_epoch=1, devices=now[0])
        peer.send(Ok(rid=message.rid, body=msgspec.to_builtins(report)))

    def drain(peer: Peer, message: DrainDevice) -> None:
        peer.send(Progress(rid=message.rid, stage="drain", note="2 jobs may go on"))
        now[0] = [device(message.device, after), *now[0][1:]]
        receipt = msgspec.structs.replace(LEFT, device=message.device)
        peer.send(Ok(rid=message.rid, body=msgspec.to_builtins(receipt)))

    broker.on |= {Status: status, DrainDevice: drain}


def test_the_only_device_is_meant_and_its_worker_named(
    broker: ScriptedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    play(broker, device())
    assert cli.main(["drain", "--clients", broker.endpoint]) == 0
    (sent,) = broker.of(DrainDevice)
    assert sent == DrainDevice(rid=sent.rid, device="cpu", worker_epoch=7, hold_ms=HOLD_MS)
    said = capsys.readouterr().out
    for part in ("pid 42 on box", "version 0.1.0", "build old-1", "2 jobs finished", "1 cut off"):
        assert part in said
    assert "3 wait for the next worker" in said
    assert "conductor worker --device cpu" in said


def test_times_and_json(broker: ScriptedBroker, capsys: pytest.CaptureFixture[str]) -> None:
    play(broker, device("cuda:0"), device("cpu"))
    flags = ["--finish", "5m", "--hold", "0", "--json", "--clients", broker.endpoint]
    assert cli.main(["drain", "cuda:0", *flags]) == 0
    (sent,) = broker.of(DrainDevice)
    assert (sent.device, sent.drain_ms, sent.hold_ms) == ("cuda:0", 300_000, 0)
    assert json.loads(capsys.readouterr().out)["cut_off"] == 1


def test_which_device_is_asked_before_anybody_is_sent_away(
    broker: ScriptedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    play(broker, device("cuda:0"), device("cpu"))
    assert cli.main(["drain", "--clients", broker.endpoint]) == 8
    assert "which device? (this broker has: cuda:0, cpu)" in capsys.readouterr().err
    assert cli.main(["drain", "cuda:1", "--clients", broker.endpoint]) == 8
    assert "cuda:1" in capsys.readouterr().err
    assert not broker.of(DrainDevice)


def test_the_next_worker_is_waited_for_and_named(
    broker: ScriptedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    play(broker, device(), after=8)
    assert cli.main(["drain", "--wait", "--clients", broker.endpoint]) == 0
    assert "the next one serves it: pid 8 on box, version 0.2.0, build lib-8" in (
        capsys.readouterr().out
    )
    play(broker, device(), after=9)
    assert cli.main(["drain", "--wait", "--json", "--clients", broker.endpoint]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["left"]["pid"], found["next"]["build"]) == (42, "lib-9")


@pytest.mark.parametrize("after", [None, 7], ids=["none", "the same again"])
def test_no_next_worker_in_time(
    broker: ScriptedBroker, capsys: pytest.CaptureFixture[str], after: int | None
) -> None:
    play(broker, device(), after=after)
    flags = ["--wait", "--hold", "0", "--clients", broker.endpoint]
    assert cli.main(["drain", *flags]) == 6
    said = capsys.readouterr()
    assert "has left" in said.out
    assert "conductor worker --device cpu" in said.err


async def _asked(endpoint: str) -> DrainReceipt:
    async with AsyncConductor(endpoint) as conductor:
        return await conductor.drain("cpu", drain_s=1.5)


def test_both_clients_ask_the_same(broker: ScriptedBroker) -> None:
    play(broker, device())
    notes: list[str] = []
    with Conductor(broker.endpoint) as conductor:
        told = conductor.drain("cpu", drain_s=1.5, on_progress=lambda news: notes.append(news.note))
        assert told == LEFT
        for wrong in ({"drain_s": -1}, {"hold_s": "soon"}, {"hold_s": 10**9}, {"worker_epoch": -1}):
            with pytest.raises(ConductorError):
                conductor.drain("cpu", **cast(Any, wrong))
        with pytest.raises(InvalidArgument):
            conductor.drain("../cpu")
    assert notes == ["2 jobs may go on"]
    assert asyncio.run(_asked(broker.endpoint)) == LEFT
    assert {(sent.drain_ms, sent.hold_ms) for sent in broker.of(DrainDevice)} == {(1500, None)}
