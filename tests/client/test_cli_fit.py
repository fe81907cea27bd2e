"""``conductor models fit``: what it sends, and what it shows."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from scripted_broker import Peer, ScriptedBroker

from vram_conductor.client import AsyncConductor, Conductor, cli
from vram_conductor.client.cli_fit import render
from vram_conductor.protocol.errors import LEDGER_DENY, Code, ErrorInfo, InvalidArgument
from vram_conductor.protocol.fitting import Fit, FitDevice, FitReport, FitRow
from vram_conductor.protocol.messages import Ok

MIB = 1 << 20
DENY = ErrorInfo(
    Code.RESOURCE_EXHAUSTED,
    LEDGER_DENY,
    "VRAM_LEDGER_DENY code=CAP …",
    details={"hint": "unregister agents", "short_by_bytes": 20 * MIB, "n_ctx": 256},
)


def row(kv_type: Any = "f16", n_ctx: int = 0, **fields: Any) -> FitRow:
    return FitRow(device="cpu", kv_type=kv_type, n_ctx=n_ctx, **fields)


FITS = row(
    n_ctx=5632,
    limit="host",
    weights_bytes=92 * MIB,
    kv_bytes=124 * MIB,
    compute_bytes=3 * MIB,
    scratch_bytes=MIB,
    state_bytes=125 * MIB,
    requested_bytes=220 * MIB,
    free_bytes=100 * MIB,
)
DEVICE = FitDevice(
    device="cpu",
    cap_bytes=1024 * MIB,
    promised_bytes=300 * MIB,
    base_bytes=100 * MIB,
    leases_bytes=50 * MIB,
    foreign_bytes=24 * MIB,
    free_bytes=700 * MIB,
    agents=1,
    host_cap_bytes=512 * MIB,
    host_promised_bytes=12 * MIB,
)


def report(*rows: FitRow, **fields: Any) -> FitReport:
    known: dict[str, Any] = {"arch": "llama", "file_bytes": 94 * MIB, "n_ctx_train": 8192}
    return FitReport(model="m", rows=list(rows), devices=[DEVICE], **(known | fields))


def test_every_byte_of_a_row_is_shown_and_fits_on_a_small_terminal() -> None:
    text = render(report(FITS, row("q8_0", 8192, limit="training", shares_weights=True)), "m", 80)
    assert text.startswith(
        "m: llama, 94.0 MiB, trained with n_ctx 8192\n\ncpu: may promise 1.00 GiB"
    )
    for part in ("300 MiB (1 agent, 100 MiB the worker itself, 50.0 MiB", "24.0 MiB", "700 MiB"):
        assert part in " ".join(text.split())
    first, second = (line.split() for line in text.splitlines() if line.startswith(("f16", "q8_0")))
    cells = "f16 5632 92.0 MiB 124 MiB 4.00 MiB 220 MiB 125 MiB host memory"
    assert first == cells.split()
    assert second[:3] == ["q8_0", "8192", "shared"]
    assert second[-1] == "training"
    assert text.endswith("conductor register AGENT --model m --n-ctx 8192 --kv-type q8_0")
    assert max(map(len, text.splitlines())) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_where_nothing_fits_the_reason_is_told_once() -> None:
    text = render(report(row(error=DENY), row("q8_0", error=DENY)), "m", 80)
    assert text.count("nothing fits") == 1
    assert "cpu: nothing fits: 20.0 MiB are missing even with n_ctx 256; unregister agents" in text
    assert "register AGENT" not in text


def test_a_kv_type_that_does_not_go_is_named_beside_those_that_do() -> None:
    no = ErrorInfo(Code.FAILED_PRECONDITION, "kv_type_unsupported", "not with this model")
    text = render(report(FITS, row("q8_0", error=no), row("q4_0", error=no)), "m", 80)
    told = "cpu: nothing fits with q8_0 and q4_0: not with this model (kv_type_unsupported)"
    assert told in " ".join(text.split())
    assert "\nq8_0            0" in text


def test_the_command_names_what_is_not_the_default() -> None:
    two = report(FITS, FITS, slots=2)
    two.devices.append(FitDevice(device="cuda:0"))
    assert render(two, "m", 80).endswith("--kv-type f16 --device cpu --slots 2")


def answering(broker: ScriptedBroker, found: FitReport) -> None:
    def answer(peer: Peer, message: Fit) -> None:
        peer.send(Ok(rid=message.rid, body=msgspec.to_builtins(found)))

    broker.on[Fit] = answer


def test_what_is_sent_and_how_it_ends(broker: ScriptedBroker, capsys: Any) -> None:
    answering(broker, report(FITS))
    flags = ["--device", "cpu", "--slots", "3", "--clients", broker.endpoint]
    assert cli.main(["models", "fit", "some.gguf", *flags]) == 0
    (message,) = broker.of(Fit)
    assert message == Fit(rid=message.rid, model="some.gguf", device="cpu", slots=3)
    out = capsys.readouterr().out
    assert "5632" in out
    assert out.endswith(f" --clients {broker.endpoint}\n"), "what is to be typed reaches the same"
    assert cli.main(["models", "fit", "m", "--json", "--clients", broker.endpoint]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["requested_bytes"] == 220 * MIB
    answering(broker, report(row(error=DENY)))
    assert cli.main(["models", "fit", "m", "--clients", broker.endpoint]) == 3
    assert cli.main(["models", "fit", "m", "--slots", "0", "--clients", broker.endpoint]) != 0


async def _asked(endpoint: str) -> FitReport:
    async with AsyncConductor(endpoint) as conductor:
        return await conductor.fit("m", slots=2)


def test_both_clients_ask_the_same(broker: ScriptedBroker) -> None:
    answering(broker, report(FITS))
    with Conductor(broker.endpoint) as conductor:
        assert conductor.fit("m", slots=2) == report(FITS)
        with pytest.raises(InvalidArgument):
            conductor.fit(cast(Any, 5))
    assert asyncio.run(_asked(broker.endpoint)) == report(FITS)
    assert {message.slots for message in broker.of(Fit)} == {2}
