"""A refusal explains itself: one line for people, exact numbers for programs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from vram_conductor.broker.ledger import refusal
from vram_conductor.broker.ledger.admission import Refusal, no_worker
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Deny, DenyCode
from vram_conductor.protocol.errors import Code, LedgerDeny, error_from_info
from vram_conductor.protocol.limits import BYTES_MAX
from vram_conductor.protocol.values import AgentKey, Line, PoolShape

MIB = 1 << 20
GIB = 1 << 30

CLAIM = Claim(
    agent=AgentKey("local", "big"),
    model="abc",
    kv_type="f16",
    n_ctx=32768,
    slots=1,
    shape=PoolShape(32768, 1, "f16"),
    weights_bytes=100 * MIB,
    pool_bytes=700 * MIB,
    state_bytes=650 * MIB,
)

CAP = Deny(
    code=DenyCode.CAP,
    device="cpu",
    ledger_max_bytes=1 * GIB,
    ledger_allocated_bytes=300 * MIB,
    requested_bytes=800 * MIB,
    foreign_bytes=50 * MIB,
    lines=(Line("weights:x", 200 * MIB), Line("pool:x@f16", 100 * MIB, True, "1024 cells")),
    claim=CLAIM,
    largest_n_ctx_that_fits=24576,
    agents=2,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (126 * MIB, "126 MiB"),
        (126 * MIB + 1, "126 MiB"),
        (1610612736, "1.50 GiB"),
        (12 * GIB + GIB // 3, "12.3 GiB"),
        (BYTES_MAX, "4 EiB"),
        (3 * BYTES_MAX, "12 EiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_sizes_for_people(count: int, text: str) -> None:
    assert refusal.human_bytes(count) == text


def test_the_line_of_a_refusal() -> None:
    assert refusal.line(CAP) == (
        "VRAM_LEDGER_DENY code=CAP device=cpu requested=800MiB allocated=300MiB foreign=50MiB "
        "max=1GiB short_by=126MiB largest_n_ctx=24576 "
        'hint="register with n_ctx=24576, which fits now, or stop other programs, which use '
        '50 MiB of cpu, or unregister agents until 126 MiB are free (2 agents hold 300 MiB)"'
    )


def test_where_nobody_has_enough_all_are_named_together() -> None:
    much = replace(CAP, requested_bytes=1200 * MIB, ledger_allocated_bytes=600 * MIB)
    much = replace(much, leases_bytes=300 * MIB, largest_n_ctx_that_fits=None)
    assert refusal.hint(much) == (
        "stop other programs, which use 50 MiB of cpu, and release leases or wait for their end "
        "(they hold 300 MiB), and unregister agents (2 agents hold 300 MiB)"
    )


def test_a_lease_that_agents_alone_are_in_the_way_of_may_let_them_make_room() -> None:
    lease = replace(CAP, claim=None, largest_n_ctx_that_fits=None, foreign_bytes=0)
    assert refusal.hint(lease) == (
        "let agents make room (park, without --no-park), or unregister agents until 76 MiB are "
        "free (2 agents hold 300 MiB)"
    )
    assert "make room" not in refusal.hint(replace(lease, requested_bytes=1100 * MIB))


def test_only_bytes_that_were_the_reason_stand_in_the_line() -> None:
    deny = Deny(DenyCode.AGENTS, "", agents=1000, note="1000 agents are registered")
    assert refusal.line(deny) == (
        'VRAM_LEDGER_DENY code=AGENTS hint="1000 agents are registered: '
        'unregister agents that are no longer used"'
    )
    stale = replace(CAP, code=DenyCode.STALE_SAMPLE, note="old")
    assert refusal.line(stale).startswith("VRAM_LEDGER_DENY code=STALE_SAMPLE device=cpu hint=")


def test_details_hold_exact_bytes() -> None:
    info = refusal.error(CAP)
    assert (info.code, info.reason, info.retryable) == (
        Code.RESOURCE_EXHAUSTED,
        "VRAM_LEDGER_DENY",
        True,
    )
    details = info.details
    assert details["code"] == "CAP"
    assert details["ledger_max_bytes"] == 1 * GIB
    assert details["ledger_allocated_bytes"] == 300 * MIB
    assert details["requested_bytes"] == 800 * MIB
    assert details["foreign_bytes"] == 50 * MIB
    assert details["short_by_bytes"] == 126 * MIB
    assert details["largest_n_ctx_that_fits"] == 24576
    assert details["pool_bytes"] == 700 * MIB
    assert details["hint"] in info.message
    assert details["lines"][1] == {
        "key": "pool:x@f16",
        "bytes": 100 * MIB,
        "unmeasured": True,
        "detail": "1024 cells",
    }
    assert "devices" not in details
    # It survives the wire, and is the typed error on the other side.
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info))
    assert again == info
    error = error_from_info(again)
    assert isinstance(error, LedgerDeny)
    assert error.details["short_by_bytes"] == 126 * MIB


def test_never_is_not_the_same_as_not_now() -> None:
    never = replace(CAP, never=True, largest_n_ctx_that_fits=0, ledger_allocated_bytes=0, agents=0)
    info = refusal.error(never)
    assert (info.code, info.retryable, info.reason) == (
        Code.OUT_OF_RANGE,
        False,
        "VRAM_LEDGER_DENY",
    )
    assert "largest_n_ctx=0" in info.message
    assert info.details["hint"] == (
        "n_ctx=32768 never fits: cpu may hand out 1 GiB in all; choose a smaller model or context, "
        "or raise the capacity of cpu by <short>"
    ).replace("<short>", refusal.human_bytes(never.short_by_bytes))
    smaller = refusal.hint(replace(CAP, never=True, agents=0))
    assert smaller == (
        "n_ctx=32768 never fits: cpu may hand out 1 GiB in all; register with n_ctx=24576, which "
        "fits now, or raise the capacity of cpu by 126 MiB"
    )
    surprise = refusal.hint(replace(CAP, never=True, code=DenyCode.MEASURED, claim=None))
    assert surprise.startswith("it is larger than its estimate; it never fits: cpu may hand out")


def test_a_refusal_by_several_devices_lists_them_all() -> None:
    small = replace(CAP, device="cpu:1", never=True, ledger_max_bytes=10, foreign_bytes=0)
    closer = replace(CAP, device="cpu:2", largest_n_ctx_that_fits=30000)
    info = refusal.error(Refusal((small, CAP, closer)))
    assert info.code is Code.RESOURCE_EXHAUSTED
    assert info.details["device"] == "cpu:2"
    assert "device=cpu:2" in info.message
    rows = {row["device"]: row for row in info.details["devices"]}
    assert set(rows) == {"cpu", "cpu:1", "cpu:2"}
    assert rows["cpu:1"]["never_fits"] is True
    assert rows["cpu"]["short_by_bytes"] == 126 * MIB
    assert all("hint" in row and "lines" not in row for row in rows.values())
    assert refusal.error(Refusal((small, replace(small, device="x")))).code is Code.OUT_OF_RANGE


def test_a_device_without_a_worker_may_take_it_later() -> None:
    away = refusal.error(no_worker("cpu"))
    assert (away.code, away.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    assert "no worker" in away.message
    never = replace(CAP, device="cpu:1", never=True)
    told = refusal.error(Refusal((never, no_worker("cpu:2"))))
    assert (told.code, told.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    # What is known about a device that was asked comes first.
    assert (told.details["device"], told.details["never_fits"]) == ("cpu:1", True)
    assert told.details["devices"][1]["code"] == "NO_DEVICE"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"largest_n_ctx_that_fits": None}, ["unregister agents until 126 MiB", "50 MiB"]),
        ({"largest_n_ctx_that_fits": None}, ["short_by=126MiB hint="]),
        ({"agents": 0, "foreign_bytes": 0, "largest_n_ctx_that_fits": 0}, ["raise the capacity"]),
        ({"admission_percent": 80}, ["admission_percent, now 80"]),
        ({"code": DenyCode.MEASURED}, ["larger than its estimate"]),
        ({"code": DenyCode.HOST}, ["host_cap of cpu, now 1 GiB, by 126 MiB", "800 MiB of host"]),
        ({"code": DenyCode.FILE, "never": True}, ["file alone has 800 MiB", "1 GiB"]),
        ({"code": DenyCode.NO_ESTIMATE, "note": 'bad "q"\nfile'}, ["bad 'q' file", "verify"]),
        ({"code": DenyCode.STALE_SAMPLE, "note": "7 s old"}, ["7 s old", "conductor status"]),
        ({"code": DenyCode.AGENTS, "note": "9 agents"}, ["9 agents", "unregister"]),
    ],
)
def test_every_code_tells_the_next_step(change: dict[str, object], words: list[str]) -> None:
    deny = replace(CAP, **change)  # type: ignore[arg-type]
    text = refusal.line(deny)
    assert "\n" not in text
    assert text.count('"') == 2
    for word in words:
        assert word in text


def test_every_code_has_a_hint() -> None:
    for code in DenyCode:
        assert len(refusal.hint(replace(CAP, code=code, note="why"))) > 20


def test_a_stale_sample_says_when_to_come_back() -> None:
    info = refusal.error(replace(CAP, code=DenyCode.STALE_SAMPLE))
    assert info.retry_after_ms == refusal.SAMPLE_RETRY_MS


def test_very_many_lines_are_summed_up() -> None:
    many = tuple(Line(f"weights:{n}", n) for n in range(1, 1001))
    details = refusal.error(replace(CAP, lines=many)).details
    assert len(details["lines"]) == refusal.LINES_MAX + 1
    assert details["lines"][0]["bytes"] == 1000
    assert details["lines"][-1]["detail"] == "936 smaller lines"
    assert sum(line["bytes"] for line in details["lines"]) == sum(range(1, 1001))


def test_absurd_but_legal_sums_still_travel() -> None:
    deny = replace(CAP, requested_bytes=3 * BYTES_MAX, ledger_allocated_bytes=3 * BYTES_MAX)
    info = refusal.error(deny)
    assert info.details["requested_bytes"] == refusal.INT64_MAX
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=type(info)) == info
