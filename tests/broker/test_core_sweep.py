"""Ephemeral agents, ``ttl_s`` and what STATUS says of the agents that went by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import MS, Bench, config_of

from vram_conductor.broker.agents.sweep import (
    KEPT,
    SHOWN,
    SweepLog,
    Swept,
    idle_due_ns,
    used_ns_of,
)
from vram_conductor.broker.journal.records import AgentUsed
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.status import SweepReason, SweepStatus
from vram_conductor.protocol.values import AgentKey

S = 1_000_000_000
REASONS: list[SweepReason] = ["session_ended", "not_back", "idle"]
moments = st.integers(0, 10**18)


def names(bench: Bench) -> list[str]:
    return [agent.agent for agent in bench.core.report(bench.now_ns).agents]


def sweep(bench: Bench) -> SweepStatus:
    return bench.core.report(bench.now_ns).sweep


def told(bench: Bench) -> list[tuple[str, str]]:
    return [(swept.agent, swept.reason) for swept in sweep(bench).last]


# --- sessions -------------------------------------------------------------------------------------


def test_a_lost_client_finds_its_ephemeral_agent_when_it_comes_back_in_time() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client("c1")
    client.ok(client.register("temp", ephemeral=True))
    client.decode("temp")
    worker.finish(worker.job("temp"))
    client.gone()
    bench.advance(limits.ORPHAN_MS - 100)
    again = bench.client("c2")
    body = again.ok(again.register("temp", ephemeral=True))
    assert body["conversations"][0]["version"] == 1
    bench.advance(10 * limits.ORPHAN_MS)
    assert names(bench) == ["temp"]
    again.send(m.Bye())
    assert names(bench) == []
    assert told(bench) == [("temp", "session_ended")]


def test_one_that_does_not_come_back_in_time_loses_it() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ephemeral=True))
    client.ok(client.register("lasting"))
    client.gone()
    bench.advance(limits.ORPHAN_MS - 100)
    assert names(bench) == ["temp", "lasting"]
    bench.advance(200)
    assert names(bench) == ["lasting"]
    assert told(bench) == [("temp", "not_back")]
    assert sweep(bench).not_back == 1


def test_a_lost_client_may_come_back_though_another_has_said_bye_meanwhile() -> None:
    bench = Bench()
    bench.worker()
    one, two = bench.client("c1"), bench.client("c2")
    one.ok(one.register("temp", ephemeral=True))
    two.ok(two.register("temp", ephemeral=True))
    one.gone()
    two.send(m.Bye())
    assert names(bench) == ["temp"]
    bench.advance(limits.ORPHAN_MS + 100)
    assert names(bench) == []


@pytest.mark.parametrize("how", ["bye", "dead"])
def test_who_cannot_come_back_is_not_waited_for(how: str) -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ephemeral=True))
    if how == "bye":
        client.send(m.Bye())
    else:
        client.gone(dead=True)
    assert names(bench) == []
    assert told(bench) == [("temp", "session_ended")]


def test_the_configured_time_counts() -> None:
    bench = Bench(config_of(orphan_ms=2_000))
    bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ephemeral=True))
    client.gone(dead=True)
    bench.advance(1_500)
    assert names(bench) == ["temp"]
    bench.advance(1_000)
    assert names(bench) == []


# --- a restart of the broker ----------------------------------------------------------------------


def test_after_a_restart_ephemeral_agents_wait_for_their_clients() -> None:
    old = Bench()
    worker = old.worker()
    client = old.client("c1")
    for name in ("mine", "gone"):
        client.ok(client.register(name, ephemeral=True))
    client.decode("mine")
    worker.finish(worker.job("mine"))
    new = old.restart()
    new.worker(epoch=2)
    again = new.client("c2")
    body = again.ok(again.register("mine", ephemeral=True))
    assert body["conversations"][0]["version"] == 1
    new.advance(limits.COME_BACK_MS - 1_000)
    assert names(new) == ["mine", "gone"]
    new.advance(2_000)
    assert names(new) == ["mine"]
    assert told(new) == [("gone", "not_back")]
    assert names(new.restart()) == ["mine"]


def test_idle_time_goes_on_over_a_restart() -> None:
    old = Bench()
    worker = old.worker()
    client = old.client()
    client.ok(client.register("temp", ttl_s=100))
    client.ok(client.register("used", ttl_s=100))
    client.ok(client.register("lasting"))
    old.advance(70_000, step_ms=2_000)
    client.decode("used")
    worker.finish(worker.job("used"))
    new = old.restart()
    assert names(new) == ["temp", "used", "lasting"]
    new.advance(31_000, step_ms=1_000)
    assert names(new) == ["used", "lasting"]
    assert told(new) == [("temp", "idle")]
    new.advance(70_000, step_ms=1_000)
    assert names(new) == ["lasting"]
    assert sweep(new).idle == 2


def test_what_was_idle_for_too_long_while_there_was_no_broker_goes_at_once() -> None:
    old = Bench()
    old.worker()
    client = old.client()
    client.ok(client.register("temp", ttl_s=5))
    old.now_ns += 6 * S
    new = old.restart()
    new.tick()
    assert names(new) == []
    assert told(new) == [("temp", "idle")]


def test_only_an_agent_with_a_time_to_live_is_recorded_as_used() -> None:
    bench = Bench()
    worker = bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ttl_s=5))
    client.ok(client.register("lasting"))
    for name in ("temp", "lasting"):
        client.decode(name)
        worker.finish(worker.job(name))
    used = [record.agent.agent for record in bench.records if isinstance(record, AgentUsed)]
    assert used == ["temp"] * len(used)
    assert used


# --- rules and the record -------------------------------------------------------------------------


@given(st.integers(1, limits.TTL_S_MAX), moments, moments, st.booleans())
def test_an_agent_is_never_due_before_it_was_idle_for_its_time(
    ttl_s: int, used_ns: int, now_ns: int, busy: bool
) -> None:
    due_ns = idle_due_ns(ttl_s, used_ns, now_ns, busy=busy)
    assert due_ns is not None
    assert due_ns - (now_ns if busy else used_ns) == ttl_s * S
    assert idle_due_ns(None, used_ns, now_ns, busy=busy) is None
    assert not busy or due_ns > now_ns


@given(st.none() | moments, moments, moments)
def test_a_new_brokers_clock_gives_no_agent_a_use_in_the_future(
    used_unix_ns: int | None, now_ns: int, now_unix_ns: int
) -> None:
    used_ns = used_ns_of(used_unix_ns, now_ns, now_unix_ns)
    assert used_ns <= now_ns
    if used_unix_ns is not None and used_unix_ns <= now_unix_ns:
        assert now_ns - used_ns == now_unix_ns - used_unix_ns


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(REASONS)), max_size=KEPT + 20))
def test_everything_is_counted_and_the_last_ones_of_ones_own_are_named(
    events: list[tuple[str, SweepReason]],
) -> None:
    log = SweepLog()
    for number, (principal, reason) in enumerate(events):
        log.note(Swept(AgentKey(principal, f"n{number}"), "cpu", reason, number * MS))
    seen = log.status(len(events) * MS, "a")
    assert [seen.session_ended, seen.not_back, seen.idle] == [
        sum(reason == one for _, reason in events) for one in REASONS
    ]
    kept = list(enumerate(events))[-KEPT:]
    mine = [(f"n{number}", len(events) - number) for number, (who, _) in kept if who == "a"]
    assert [(swept.agent, swept.age_ms) for swept in seen.last] == mine[::-1][:SHOWN]
    assert len(log.status(0, None).last) == min(len(events), SHOWN)


def test_others_are_counted_and_not_named() -> None:
    bench = Bench()
    bench.worker()
    client = bench.client()
    client.ok(client.register("temp", ephemeral=True))
    client.send(m.Bye())
    other = bench.core._state.sweeps.status(bench.now_ns, "somebody-else")
    assert (other.session_ended, other.last) == (1, [])
