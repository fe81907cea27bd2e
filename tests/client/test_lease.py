"""Leases in the client library and on the command line, against a scripted broker."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from scripted_broker import Peer, ScriptedBroker, error_info, eventually, lease_status, nothing

from vram_conductor.client import (
    AsyncConductor,
    Conductor,
    ConductorError,
    DeadlineExceeded,
    InvalidArgument,
    LedgerDeny,
    NotFound,
    OutOfRange,
    cli,
)
from vram_conductor.client.renewal import Renewal
from vram_conductor.client.time_argument import seconds
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as wire
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.ids import new_rid
from vram_conductor.protocol.messages import Lease

DENY = ErrorInfo(Code.RESOURCE_EXHAUSTED, "VRAM_LEDGER_DENY", "no room", retryable=True)


def refuse(peer: Peer, message: wire.Lease) -> None:
    peer.fail(message.rid, DENY)


def asked(broker: ScriptedBroker) -> list[wire.Lease]:
    return [message for message in broker.of(wire.Lease) if not message.release]


def released(broker: ScriptedBroker) -> list[wire.Lease]:
    return [message for message in broker.of(wire.Lease) if message.release]


# --- the library ------------------------------------------------------------------------------


def test_a_lease_is_asked_for_and_released(broker: ScriptedBroker) -> None:
    with Conductor(broker.endpoint) as conductor:
        lease = conductor.lease("train", "3 GB", ttl_s=600, device="cuda:0", park=False)
        (message,) = asked(broker)
        assert message == Lease(
            rid=message.rid,
            name="train",
            lease_bytes=3_000_000_000,
            ttl_s=600,
            device="cuda:0",
            park=False,
        )
        assert (lease.name, lease.info.bytes, lease.info.device) == (
            "train",
            3_000_000_000,
            "cuda:0",
        )
        lease.renew()
        again = asked(broker)[1]
        assert again.rid != message.rid
        assert again == msgspec.structs.replace(message, rid=again.rid)
        lease.release()
        lease.release()
        assert not broker.leases
        with pytest.raises(NotFound):
            conductor.release_lease("train")


def test_in_a_block_it_is_renewed_and_released_at_the_end(broker: ScriptedBroker) -> None:
    with Conductor(broker.endpoint) as conductor:
        with conductor.lease("train", 1000, ttl_s=1) as lease:
            eventually(lambda: len(asked(broker)) > 2, "it is renewed")
            assert lease.error is None
            assert "train" in broker.leases
        assert len(released(broker)) == 1
        count = len(asked(broker))
    assert len(asked(broker)) == count


def test_a_renewal_that_fails_is_told_and_tried_again(broker: ScriptedBroker) -> None:
    accept = broker.on[wire.Lease]
    with Conductor(broker.endpoint) as conductor, conductor.lease("t", 1000, ttl_s=1) as lease:
        broker.on[wire.Lease] = refuse
        eventually(lambda: lease.error is not None, "it is told")
        assert isinstance(lease.error, LedgerDeny)
        broker.on[wire.Lease] = accept
        eventually(lambda: lease.error is None, "it is held again")


def test_a_block_that_fails_releases_too(broker: ScriptedBroker) -> None:
    with Conductor(broker.endpoint) as conductor:
        with pytest.raises(ZeroDivisionError), conductor.lease("train", 1000):
            raise ZeroDivisionError
        assert not broker.leases


def test_without_a_broker_a_block_ends_quietly(broker: ScriptedBroker) -> None:
    with Conductor(broker.endpoint, reconnect_s=0.2) as conductor, conductor.lease("t", 1000):
        conductor.close()


def test_a_lease_that_nobody_waits_for_any_more_is_withdrawn(broker: ScriptedBroker) -> None:
    broker.on[wire.Lease] = nothing
    with Conductor(broker.endpoint) as conductor:
        with pytest.raises(DeadlineExceeded):
            conductor.lease("train", 1000, timeout_s=0.2)
        _, cancel = broker.expect(wire.Cancel)
        assert cancel.rid == asked(broker)[0].rid


def test_news_extend_the_patience(broker: ScriptedBroker) -> None:
    news: list[tuple[str, int, int]] = []

    def slowly(peer: Peer, message: wire.Lease) -> None:
        peer.send(wire.Progress(rid=message.rid, stage="park", done=400, total=1000))
        peer.send(wire.Ok(rid=message.rid, body=msgspec.to_builtins(lease_status(message))))

    broker.on[wire.Lease] = slowly
    with Conductor(broker.endpoint) as conductor:
        conductor.lease(
            "train", 1000, on_progress=lambda x: news.append((x.stage, x.done, x.total))
        )
    assert news == [("park", 400, 1000)]


def test_a_release_whose_answer_was_lost_is_one_all_the_same(broker: ScriptedBroker) -> None:
    release = broker.on[wire.Lease]

    def unheard(peer: Peer, message: wire.Lease) -> None:
        broker.leases.pop(message.name)
        broker.on[wire.Lease] = release

    with Conductor(broker.endpoint) as conductor, ThreadPoolExecutor(1) as pool:
        conductor.lease("train", 1000)
        broker.on[wire.Lease] = unheard
        done = pool.submit(conductor.release_lease, "train")
        eventually(lambda: bool(released(broker)), "it is sent")
        broker.cut()
        done.result(30)
        assert len(released(broker)) == 2


NONSENSE: list[tuple[Callable[[Any], object], type[ConductorError], str]] = [
    (lambda c: c.lease("train", 0), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", -5), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", "3 potatoes"), InvalidArgument, "bad_size"),
    (lambda c: c.lease("train", 1.5e9), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", 1 << 70), OutOfRange, "limit_exceeded"),
    (lambda c: c.lease("train", (1 << 63) - 1), OutOfRange, "limit_exceeded"),
    (lambda c: c.lease("train", 5, ttl_s=0), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", 5, ttl_s=float("nan")), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", 5, ttl_s=3601), OutOfRange, "limit_exceeded"),
    (lambda c: c.lease("a/b", 5), InvalidArgument, "bad_name"),
    (lambda c: c.lease("", 5), InvalidArgument, "bad_name"),
    (lambda c: c.lease("train", 5, timeout_s=0), InvalidArgument, "bad_value"),
    (lambda c: c.lease("train", 5, park="maybe"), InvalidArgument, "bad_value"),
]


@pytest.mark.parametrize(("call", "error", "reason"), NONSENSE)
def test_nonsense_is_not_even_sent(
    broker: ScriptedBroker,
    call: Callable[[Conductor], object],
    error: type[ConductorError],
    reason: str,
) -> None:
    with Conductor(broker.endpoint) as conductor:
        with pytest.raises(error) as caught:
            call(conductor)
        assert caught.value.info.reason == reason
        assert not broker.of(wire.Lease)


def test_an_unknown_option_is_a_type_error(broker: ScriptedBroker) -> None:
    options: dict[str, Any] = {"temperature": 0}
    with Conductor(broker.endpoint) as conductor, pytest.raises(TypeError, match="temperature"):
        conductor.lease("train", 5, **options)


def test_when_to_renew() -> None:
    def pauses(ttl_s: int) -> tuple[float, float]:
        renewal = Renewal(Lease(rid=new_rid(), name="x", lease_bytes=1, ttl_s=ttl_s), 1000)
        return renewal.pause_s(failed=False), renewal.pause_s(failed=True)

    assert pauses(90) == (30, 10)
    assert pauses(3) == (1, 0.5)
    assert pauses(limits.LEASE_TTL_S_MAX)[0] == limits.LEASE_TTL_S_MAX / 3


# --- asyncio ----------------------------------------------------------------------------------


def test_asyncio(broker: ScriptedBroker) -> None:
    async def main() -> None:
        async with AsyncConductor(broker.endpoint) as conductor:
            async with conductor.lease("train", "1 KiB", ttl_s=1) as lease:
                assert lease.info is not None
                assert lease.info.bytes == 1024
                while len(asked(broker)) < 3:
                    await asyncio.sleep(0.01)
                broker.on[wire.Lease], accept = refuse, broker.on[wire.Lease]
                while lease.error is None:
                    await asyncio.sleep(0.01)
                broker.on[wire.Lease] = accept
            assert not broker.leases
            alone = await conductor.lease("alone", 5, ephemeral=True)
            assert broker.leases["alone"].ephemeral
            await alone.renew()
            await alone.release()
            with pytest.raises(NotFound):
                await conductor.release_lease("alone")
            broker.on[wire.Lease] = refuse
            with pytest.raises(LedgerDeny):
                async with conductor.lease("train", 5):
                    raise AssertionError("it was not granted")

    asyncio.run(asyncio.wait_for(main(), 60))


# --- the command line -------------------------------------------------------------------------


def run(broker: ScriptedBroker, *arguments: str) -> int:
    return cli.main(["lease", *arguments, "--clients", broker.endpoint])


def test_command_line(broker: ScriptedBroker, capsys: Any) -> None:
    assert run(broker, "train", "3GB", "--ttl", "10m", "--device", "cuda:0") == 0
    (message,) = asked(broker)
    assert (message.lease_bytes, message.ttl_s, message.device) == (3_000_000_000, 600, "cuda:0")
    assert (message.park, message.ephemeral) == (True, False)
    out = capsys.readouterr().out
    assert "train has 2.79 GiB of cuda:0 for 10 min 0 s" in out
    assert "conductor lease train --release" in out
    assert run(broker, "train", "--release") == 0
    assert not broker.leases
    assert run(broker, "train", "--release") == 4
    assert "no_such_lease" in capsys.readouterr().err
    assert run(broker, "other", "5", "--no-park", "--json") == 0
    assert json.loads(capsys.readouterr().out)["park"] is False


def test_an_admin_names_whose_lease_is_to_end(broker: ScriptedBroker, capsys: Any) -> None:
    """A broker that does not know whose must not take it for the admin's own."""
    assert run(broker, "train", "5") == 0
    assert run(broker, "train", "--release", "--principal", "alice") == 0
    message = broker.of(wire.Lease)[-1]
    assert (message.principal, message.release, message.lease_bytes) == ("alice", False, 0)
    assert run(broker, "train", "5", "--principal", "alice") == 8
    assert "--release" in capsys.readouterr().err
    with Conductor(broker.endpoint) as conductor, pytest.raises(InvalidArgument):
        conductor.release_lease("train", principal="a/b")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["train"], 8, "how much?"),
        (["train", "3 potatoes"], 8, "bad_size"),
        (["train", "3GB", "--ttl", "0"], 8, "ttl_s"),
        (["train", "3GB", "--ttl", "2h"], 8, "3600"),
        (["a/b", "3GB"], 8, "bad_name"),
    ],
)
def test_command_line_errors(
    broker: ScriptedBroker, capsys: Any, arguments: list[str], code: int, text: str
) -> None:
    assert run(broker, *arguments) == code
    assert text in capsys.readouterr().err
    assert not broker.of(wire.Lease)


def test_a_refusal_on_the_command_line(broker: ScriptedBroker, capsys: Any) -> None:
    broker.on[wire.Lease] = refuse
    assert run(broker, "train", "3GB") == 3
    differences = {"bytes": [5, 6], "device": ["cpu", "cuda:0"]}
    broker.on[wire.Lease] = lambda peer, message: peer.fail(
        message.rid, error_info(Code.ALREADY_EXISTS, "lease_exists", differences=differences)
    )
    assert run(broker, "train", "3GB") == 5
    error = capsys.readouterr().err
    assert "bytes is 5, not 6, device is cpu, not cuda:0" in error
    assert "conductor lease NAME --release" in error


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), ("90s", 90), ("10m", 600), ("10 min", 600), ("1h", 3600), ("2d", 172800)],
)
def test_times(text: str, value: int) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "m", "-5", "1.5h", "nan", "10 parsecs", "1e3"])
def test_no_times(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        seconds(text)
