"""The picture that ``conductor status`` draws."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vram_conductor.client.board import render
from vram_conductor.client.board_agents import CONVERSATIONS_SHOWN_MAX, render_agents, who
from vram_conductor.client.doctor import leases_text
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.status import (
    AgentStatus,
    ConversationStatus,
    DeviceStatus,
    JobStatus,
    LeaseStatus,
    LedgerStatus,
    StatusReport,
    SweepStatus,
    SweptStatus,
    WorkerStatus,
)
from vram_conductor.protocol.values import Line, Memory

MIB = 1 << 20
DENY = (
    "VRAM_LEDGER_DENY code=CAP device=cpu requested=136MiB allocated=374MiB foreign=0B "
    "max=382MiB short_by=128MiB largest_n_ctx=2304"
)


def agent(name: str = "coder", **fields: Any) -> AgentStatus:
    whole: dict[str, Any] = {
        "principal": "local",
        "agent": name,
        "model": "smollm2-135m",
        "model_id": "0c9de4d59d88",
        "device": "cpu",
        "state": "ready",
        "n_ctx": 2048,
    }
    return AgentStatus(**{**whole, **fields})


def talk(name: str = "main", tokens: int = 100, **fields: Any) -> ConversationStatus:
    return ConversationStatus(conversation=name, tokens=tokens, version=1, **fields)


def device(**fields: Any) -> DeviceStatus:
    lines = [
        Line("weights:0c9de4d59d88", 92 * MIB, detail="smollm2-135m"),
        Line("weights:ff6ebc951e78", 235 * MIB, detail="gemma3-270m"),
        Line("scratch:0c9de4d59d88", 0),
        Line("pool:0c9de4d59d88@f16", 92 * MIB, detail="4096 cells, 1 slot, 1 agent"),
        Line("pool:ff6ebc951e78@f16", 20 * MIB, unmeasured=True, detail="4096 cells, 1 slot"),
    ]
    whole: dict[str, Any] = {
        "device": "cpu",
        "kind": "cpu",
        "name": "Some Processor @ 2.20GHz",
        "promised": LedgerStatus(cap_bytes=2048 * MIB, promised_bytes=419 * MIB, lines=lines),
        "host": LedgerStatus(cap_bytes=2048 * MIB, promised_bytes=104 * MIB),
        "resident": [lines[0], Line("base", 300 * MIB)],
        "resident_bytes": 392 * MIB,
        "parked": [Line("parked:local/coder/main", 3 * MIB)],
        "memory": Memory(used_bytes=1000 * MIB, own_bytes=392 * MIB, foreign_bytes=608 * MIB),
        "sample_age_ms": 600,
        "foreign_bytes": 608 * MIB,
        "budget_bytes": 1440 * MIB,
        "swaps": 3,
        "worker": WorkerStatus(
            worker="cpu@box",
            worker_epoch=1,
            pid=13318,
            host="box",
            version="1",
            build="b",
            mechanism_note="states are copied between slots and shared memory",
        ),
    }
    return DeviceStatus(**{**whole, **fields})


def report(**fields: Any) -> StatusReport:
    whole: dict[str, Any] = {
        "broker_epoch": 5,
        "version": "0.1.0",
        "uptime_ms": 32_050,
        "sessions": 1,
        "devices": [device()],
        "queued_max": 1024,
    }
    return StatusReport(**{**whole, **fields})


def crowd() -> StatusReport:
    """Twenty agents on two devices, long names, conversations, a suspended one, jobs."""
    agents = [
        agent(
            f"researcher-number-{index}",
            model="some-longer-model-name.Q4_K_M" if index % 2 else "gemma3-270m",
            device="cuda:0" if index % 5 else "cpu",
            state="suspended" if index == 3 else "ready",
            kv_type="q8_0" if index % 3 else "f16",
            reason=ErrorInfo(Code.RESOURCE_EXHAUSTED, "VRAM_LEDGER_DENY", DENY)
            if index == 3
            else None,
            conversations=[
                talk("main", 1000 * index, where="slot", parked_bytes=9 * MIB),
                talk("plan-of-the-whole-day", 1000 * index, where="parked", parked_bytes=9 * MIB),
            ][: index % 3],
        )
        for index in range(20)
    ]
    jobs = [
        JobStatus(
            job=index,
            principal="local",
            agent="researcher-number-1",
            conversation="plan-of-the-whole-day",
            device="cpu",
            state="queued",
            attempt=1 + index % 2,
            age_ms=70_000,
        )
        for index in range(30)
    ]
    trouble = "No space left on device: the journal is not written; free some space"
    return report(
        agents=agents,
        agents_total=25,
        jobs=jobs,
        queued=30,
        journal_trouble=trouble,
        devices=[device(), device(device="cuda:0", kind="cuda", mode="timeshare")],
    )


@pytest.mark.parametrize("width", [80, 90, 100, 140])
def test_twenty_agents_fit_into_the_terminal(width: int) -> None:
    drawn = render(crowd(), width)
    assert max(map(len, drawn.splitlines())) <= width
    named = [line.split()[0] for line in drawn.splitlines() if line.startswith("rese")]
    assert len(named) == 20
    assert len(set(named)) == 20, "shortened names are still told apart"
    assert "… and 10 more" in drawn


def test_everything_a_report_says_is_there() -> None:
    drawn = render(crowd(), 100)
    for text in (
        "25 agents, 20 of them yours",
        "! agents and conversations are not saved now: No space left on device",
        "! researcher-number-3 is suspended: VRAM_LEDGER_DENY",
        "queue: 30 of 1024 waiting",
        "queued, attempt 2",
        "worker pid 13318 on box, idle",
        "foreign 608 MiB",
        "the worker may use 1.41 GiB",
        "parked KV 3.00 MiB in shared memory, 104 MiB promised of 2.00 GiB (with room to write the "
        "next state beside the last); moved 3 times",
        "smollm2-135m",
    ):
        assert text in " ".join(drawn.split()), text


def test_agents_that_went_by_themselves() -> None:
    assert "unregistered" not in render(StatusReport(broker_epoch=1))
    last = [
        SweptStatus(principal="local", agent=f"a{n}", device="cpu", reason="idle", age_ms=2000 * n)
        for n in range(5)
    ]
    sweep = SweepStatus(session_ended=2, idle=5, last=last)
    text = render(StatusReport(broker_epoch=1, sweep=sweep), width=200)
    assert (
        "7 agents unregistered without being asked: 2 with their session, 5 idle; "
        "last: a0 (idle, 0.0 ms ago), a1 (idle, 2.00 s ago), a2 (idle, 4.00 s ago)\n"
    ) in text
    text = render(StatusReport(broker_epoch=1, sweep=SweepStatus(not_back=1)))
    assert "1 agent unregistered without being asked: 1 whose client did not come back\n" in text


def test_weights_that_nobody_used() -> None:
    assert "nobody used" not in render(StatusReport(broker_epoch=1, devices=[device()]))
    text = render(StatusReport(broker_epoch=1, devices=[device(lingered=2)]))
    assert "weights left 2 times because nobody used them" in text


def test_the_bars() -> None:
    lines = render(report(), 80).splitlines()
    promised = next(line for line in lines if line.startswith("  promised ["))
    resident = next(line for line in lines if line.startswith("  resident ["))
    assert promised.index("]") == resident.index("]")
    # 419 of 2048 MiB: pools take turns, so the second one is not drawn; then 608 foreign.
    bar = promised[promised.index("[") + 1 : promised.index("]")]
    width = len(bar)
    assert bar.count("W") == pytest.approx(width * 327 / 2048, abs=1)
    assert bar.count("P") == pytest.approx(width * 92 / 2048, abs=1)
    assert bar.count("f") == pytest.approx(width * 608 / 2048, abs=1)
    assert promised.endswith("1.00 GiB of 2.00 GiB (50 %)")
    assert lines[lines.index(resident) + 1].split() == (
        ["b", "base", "W", "weights", "P", "pool", "f", "foreign", ".", "free"]
    )


def test_what_takes_turns_is_drawn_once() -> None:
    lines = [
        Line("weights:a", 100 * MIB),
        Line("weights:b", 100 * MIB),
        Line("pool:a@f16", 200 * MIB),
        Line("pool:b@f16", 200 * MIB),
    ]

    def marks(mode: str, promised: int) -> tuple[int, int]:
        ledger = LedgerStatus(cap_bytes=800 * MIB, promised_bytes=promised * MIB, lines=lines)
        one = device(mode=mode, promised=ledger, resident=[], memory=None)
        drawn = next(x for x in render(report(devices=[one]), 80).splitlines() if "[" in x)
        bar = drawn[drawn.index("[") + 1 : drawn.index("]")]
        weights, pools = (round(8 * bar.count(mark) / len(bar)) for mark in "WP")
        return weights, pools

    assert marks("reserve", 400) == (2, 2)
    assert marks("timeshare", 300) == (2, 1)
    assert marks("reserve", 600) == (2, 4), "two pools on two promises"


def test_the_lines() -> None:
    lines = render(report(), 100).splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["weights:0c9de4d59d88"] == ["92.0", "MiB", "92.0", "MiB", "smollm2-135m"]
    assert rows["weights:ff6ebc951e78"][:3] == ["235", "MiB", "-"]
    assert rows["pool:ff6ebc951e78@f16"][:3] == ["~20.0", "MiB", "-"]
    assert rows["base"] == ["-", "300", "MiB"]
    assert "scratch:0c9de4d59d88" not in rows, "nothing is promised and nothing is there"
    assert any("pools take turns: the largest counts" in line for line in lines)


def test_a_budget_that_is_the_cap_is_not_worth_a_word() -> None:
    quiet = device(
        foreign_bytes=0,
        budget_bytes=2048 * MIB,
        memory=Memory(used_bytes=392 * MIB, own_bytes=392 * MIB, foreign_bytes=0),
    )
    drawn = render(report(devices=[quiet]), 80)
    assert "the worker may use" not in drawn
    assert "f foreign" not in drawn


def test_a_device_without_worker_or_sample() -> None:
    drawn = render(report(devices=[device(worker=None, memory=None, absent_ms=3_000)]), 200)
    assert "! no worker for 3.00 s (jobs are refused): agents wait, nothing is lost" in drawn
    gone = device(worker=None, absent_ms=3_000, away="stopped", patience_ms=117_000)
    drawn = render(report(devices=[gone]), 200)
    assert "(the last one was stopped; jobs wait 1 min 57 s more for the next one)" in drawn
    drawn = render(report(devices=[device(worker=None, memory=None, absent_ms=3_000)]), 80)
    assert "! no memory sample yet" in drawn


def test_nothing_at_all() -> None:
    drawn = render(StatusReport(broker_epoch=1), 80)
    assert "no device: add a [[device]] section" in drawn
    assert "no agents; add one with: conductor register NAME --model MODEL" in drawn
    empty = device(
        promised=LedgerStatus(cap_bytes=0), resident=[], resident_bytes=0, parked=[], worker=None
    )
    assert "nothing is promised, nothing is resident" in render(report(devices=[empty]), 80)


def test_one_device_needs_no_column() -> None:
    assert "device" not in render_agents([agent(), agent("b")], 80)
    assert "device" in render_agents([agent(), agent("b", device="cpu:1")], 80)


def test_conversations() -> None:
    talks = [
        talk("plan", 50, where="parked", parked_bytes=3 * MIB),
        talk("main", 100, where="slot"),
        talk("old", 70),
        talk("empty", 0),
    ]
    lines = render_agents([agent(conversations=talks)], 80).splitlines()
    assert lines[1].split() == ["coder", "smollm2-135m", "ready", "2048", "100", "in", "slot", "-"]
    assert lines[2].split() == ["/plan", "50", "parked", "3.00", "MiB"]
    assert lines[3].split() == ["/old", "70", "gone", "-"]
    assert lines[4].split() == ["/empty", "0", "-", "-"]
    assert lines[5].startswith("KV gone: it is computed again")


@pytest.mark.parametrize("state", ["waiting", "loading"])
def test_before_the_worker_has_said_what_is_parked_nothing_is_called_gone(state: str) -> None:
    drawn = render_agents([agent(state=state, conversations=[talk("main", 70)])], 80)
    assert drawn.splitlines()[1].split()[-3:] == ["70", "-", "-"]
    assert "gone" not in drawn
    ready = render_agents([agent(state="ready", conversations=[talk("main", 70)])], 80)
    assert "KV gone" in ready


def test_many_conversations_are_counted() -> None:
    talks = [talk(f"t{index}", 10, parked_bytes=MIB) for index in range(100)]
    lines = render_agents([agent(conversations=talks)], 80).splitlines()
    assert len(lines) == 1 + 1 + CONVERSATIONS_SHOWN_MAX + 1 + 1
    assert lines[-2].split() == ["…", "96", "more", "960", "96.0", "MiB"]


def test_who() -> None:
    assert who("coder", "main") == "coder"
    assert who("coder", "plan") == "coder/plan"


def test_list_and_status_say_the_same_of_an_agent() -> None:
    agents = [agent(), agent("b", conversations=[talk(where="slot")])]
    assert render_agents(agents, 80) in render(report(agents=agents, agents_total=2), 80)


def test_it_draws_what_came_over_the_wire() -> None:
    whole = crowd()
    again = msgspec.convert(msgspec.to_builtins(whole), StatusReport)
    assert render(again, 80) == render(whole, 80)


def test_leases_and_who_waits_for_them() -> None:
    fields: dict[str, Any] = {"principal": "local", "device": "cpu", "ttl_s": 600}
    leases = [
        LeaseStatus(name="train", bytes=800 * MIB, state="held", left_ms=65_000, **fields),
        LeaseStatus(
            name="own", bytes=1 * MIB, state="held", left_ms=9_000, ephemeral=True, **fields
        ),
        LeaseStatus(name="next", bytes=100 * MIB, state="pending", **fields),
    ]
    lines = [Line("lease:local/train", 800 * MIB), Line("lease:others", 300 * MIB)]
    ledger = LedgerStatus(cap_bytes=2048 * MIB, promised_bytes=1100 * MIB, lines=lines)
    # The holder uses 608 MiB of its lease: the sample calls that foreign, the ledger does not.
    one = device(leases=leases, promised=ledger, foreign_bytes=0, resident=[], resident_bytes=0)
    job = JobStatus(
        job=7,
        principal="local",
        agent="coder",
        conversation="main",
        device="cpu",
        state="queued",
        waiting="lease:local/train",
        waiting_ms=65_000,
    )
    other = msgspec.structs.replace(job, job=8, waiting="foreign", waiting_ms=None)
    drawn = render(report(devices=[one], jobs=[job, other]), 100)
    for text in (
        "lease train: 800 MiB, ends in 1 min 5 s unless it is renewed",
        "lease own: 1.00 MiB, ends in 9.00 s unless it is renewed, or with its session",
        "lease next: 100 MiB; agents are making room for it",
        "lease:others 300 MiB -",
        "queued (waits for lease:local/train, 1 min 5 s at most)",
        "queued (waits for foreign)",
    ):
        assert text in " ".join(drawn.split()), text
    note = "a lease may take what agents were promised"
    beyond = msgspec.structs.replace(ledger, cap_bytes=1000 * MIB)
    tight = device(leases=leases, promised=beyond, foreign_bytes=0, resident=[], resident_bytes=0)
    assert note not in drawn
    assert note in render(report(devices=[tight]), 100)
    promised = next(line for line in drawn.splitlines() if line.startswith("  promised ["))
    bar = promised[promised.index("[") + 1 : promised.index("]")]
    assert bar.count("L") == pytest.approx(len(bar) * 1100 / 2048, abs=1)
    assert "f" not in bar
    assert all(len(line) <= 80 for line in render(report(devices=[one], jobs=[job]), 80).split())


def test_pinned_backups_are_no_parked_states() -> None:
    lines = [Line("parked:local/coder/main", 3 * MIB), Line("pinned:0c9de4d59d88", 92 * MIB)]
    drawn = " ".join(render(report(devices=[device(parked=lines)]), 100).split())
    assert "parked KV 3.00 MiB in shared memory" in drawn
    assert "92.0 MiB of weights backed up in pinned host memory" in drawn


def test_the_mechanism_and_why() -> None:
    worker = WorkerStatus(
        worker="w",
        worker_epoch=1,
        pid=1,
        host="box",
        version="1",
        build="b",
        mechanism="vmm-sleep",
        mechanism_note="weights and pools sleep and wake at the same addresses",
    )
    drawn = " ".join(render(report(devices=[device(worker=worker)]), 100).split())
    assert "idle; vmm-sleep: weights and pools sleep and wake at the same addresses" in drawn


def test_a_worker_that_is_cut_off_is_said_to_be() -> None:
    worker = WorkerStatus(
        worker="w", worker_epoch=1, pid=7, host="box", version="1", build="b", away_ms=8_000
    )
    drawn = " ".join(render(report(devices=[device(worker=worker)]), 100).split())
    assert "! worker pid 7 on box is cut off and works on; it is waited for 8.00 s more" in drawn


def test_the_doctor_says_what_leases_hold() -> None:
    assert leases_text(report()) == ""
    lines = [Line("lease:local/a", 800 * MIB), Line("lease:others", 200 * MIB), Line("base", 1)]
    ledger = LedgerStatus(cap_bytes=2048 * MIB, promised_bytes=1000 * MIB, lines=lines)
    found = leases_text(report(devices=[device(), device(promised=ledger, device="cuda:0")]))
    assert found == "; 2 leases hold 1000 MiB of cuda:0"


def test_agents_of_several_principals_are_told_apart() -> None:
    mine, hers = agent(principal="me"), agent(principal="alice")
    assert "alice" not in render_agents([hers, hers])
    text = render_agents([mine, hers])
    assert "me: coder" in text
    assert "alice: coder" in text


def test_jobs_of_several_principals_say_whose_they_are() -> None:
    """Their numbers count each principal's own."""
    job = JobStatus(
        job=1, principal="alice", agent="coder", conversation="main", device="cpu", state="running"
    )
    other = msgspec.structs.replace(job, principal="bob")
    assert "alice" not in render(report(jobs=[job]), 100)
    drawn = render(report(jobs=[job, other]), 100)
    assert "alice: coder" in drawn
    assert "bob: coder" in drawn


def test_what_is_left_over_is_explained() -> None:
    """A pool keeps the size that an agent asked for who is gone; weights linger."""
    weights, pool = Line("weights:a", 100 * MIB), Line("pool:a@f16", 20 * MIB)
    says = "left over: it goes for whoever comes"

    def notes(*resident: Line) -> bool:
        promised = LedgerStatus(
            cap_bytes=2048 * MIB, promised_bytes=120 * MIB, lines=[weights, pool]
        )
        drawn = device(promised=promised, resident=list(resident))
        return says in " ".join(render(report(devices=[drawn]), 80).split())

    assert not notes(weights, pool)
    assert not notes(weights, Line("base", 300 * MIB)), "it was never promised as a line"
    assert not notes(Line("weights:a", 0)), "it sleeps"
    assert notes(weights, Line("pool:a@f16", 90 * MIB))
    assert notes(weights, pool, Line("weights:b", 100 * MIB))
