"""LEASE in the core: room is made, proven, held for a time, given back. Sizes in MiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_worker import MIB, MODELS, MS, Bench, Client, ScriptedWorker, config_of

from vram_conductor.broker.journal.records import LeaseEnded, LeaseHeld
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import LEDGER_DENY, Code
from vram_conductor.protocol.status import DeviceStatus, JobStatus, LeaseStatus
from vram_conductor.protocol.values import Line, Memory

CAP = 1024
SMALL = (MODELS["small"].weights_bytes + MODELS["small"].pool_bytes(4096)) // MIB
"""What the agent ``coder`` takes alone."""


class Setting:
    """A bench with a worker, a client, and the agent ``coder`` (unless told otherwise)."""

    def __init__(self, *agents: str, **broker: Any) -> None:
        self.bench = Bench(config_of(**broker))
        self.worker: ScriptedWorker = self.bench.worker()
        self.client: Client = self.bench.client()
        for agent in agents or ("coder",):
            self.client.ok(self.client.register(agent, n_ctx=4096))

    def held(self, name: str, size: int, **fields: Any) -> LeaseStatus:
        """A lease that is granted at once."""
        rid = self.client.lease(name, size * MIB, **fields)
        self.bench.turn()
        self.worker.residency()
        return status_of(self.client.ok(rid))

    def device(self, index: int = 0) -> DeviceStatus:
        return self.bench.core.report(self.bench.now_ns).devices[index]

    def job(self) -> JobStatus:
        (job,) = self.bench.core.report(self.bench.now_ns).jobs
        return job

    def lines(self) -> list[str]:
        return [line.key for line in self.device().promised.lines if line.key.startswith("lease")]


def status_of(body: dict[str, Any]) -> LeaseStatus:
    return LeaseStatus(**body)


# --- the good way -----------------------------------------------------------------------------


def test_ok_comes_when_the_worker_has_confirmed_and_a_sample_from_after_it_shows_the_room() -> None:
    it = Setting()
    it.worker.auto -= {c.Budget}
    it.worker.own_bytes = 600 * MIB
    rid = it.client.lease("train", 500 * MIB, ttl_s=600)
    budget = it.worker.waiting(c.Budget)
    assert budget.budget_bytes == (CAP - 500) * MIB
    assert it.client.got(rid, m.Progress)[-1].stage == "park"
    # A sample without the confirmation proves nothing, though all looks well.
    it.worker.own_bytes = 0
    it.worker.residency()
    assert not it.client.got(rid, m.Ok)
    (lease,) = it.device().leases
    assert (lease.state, lease.left_ms) == ("pending", None)
    it.bench.turn()
    it.worker.answer(budget)
    # The confirmation without a sample from after it does not, either: an old one is no proof.
    assert not it.client.got(rid, m.Ok)
    it.worker.residency(memory=Memory(used_bytes=0, own_bytes=0, foreign_bytes=0, age_ms=50))
    assert not it.client.got(rid, m.Ok)
    # Nor does one that shows no room: the worker has not come down.
    it.bench.turn()
    it.worker.own_bytes = 525 * MIB
    it.worker.residency()
    news = it.client.got(rid, m.Progress)[-1]
    assert (news.done, news.total) == (499 * MIB, 500 * MIB)
    assert not it.client.got(rid, m.Ok)
    it.worker.own_bytes = 524 * MIB
    it.worker.residency()
    lease = status_of(it.client.ok(rid))
    assert lease == LeaseStatus(
        principal="local",
        name="train",
        device="cpu",
        bytes=500 * MIB,
        state="held",
        ttl_s=600,
        left_ms=600_000,
    )
    assert it.device().leases == [lease]
    assert it.lines() == ["lease:local/train"]
    assert [type(record) for record in it.bench.records][-1] is LeaseHeld


def test_it_ends_by_itself_and_the_worker_and_new_agents_get_the_bytes() -> None:
    it = Setting()
    it.held("train", 900, ttl_s=10)
    error = it.client.error(it.client.register("more", "other"))
    assert error.details["leases_bytes"] == 900 * MIB
    held = it.device().promised.promised_bytes - 900 * MIB
    assert f"1 agent holds {held // MIB} MiB" in error.details["hint"]
    assert "release leases or wait for their end (they hold 900 MiB)" in error.details["hint"]
    it.bench.advance(9_999)
    assert it.lines()
    assert it.device().budget_bytes == (CAP - 900) * MIB
    it.bench.advance(1)
    assert not it.lines()
    assert it.device().leases == []
    assert it.worker.all(c.Budget)[-1].budget_bytes == CAP * MIB
    assert it.bench.records[-1] == LeaseEnded(principal="local", name="train")
    it.client.ok(it.client.register("more", "other"))


def test_the_same_again_renews_from_now_on() -> None:
    it = Setting()
    it.held("train", 100, ttl_s=10)
    for ttl_s in (10, 20, 5):
        it.bench.advance(4_000)
        lease = status_of(it.client.ok(it.client.lease("train", 100 * MIB, ttl_s=ttl_s)))
        assert (lease.ttl_s, lease.left_ms) == (ttl_s, ttl_s * 1000)
    it.bench.advance(4_999)
    assert it.lines()
    it.bench.advance(1)
    assert not it.lines()


def test_release_ends_it_and_a_second_one_finds_nothing() -> None:
    it = Setting()
    it.held("train", 100)
    assert it.client.ok(it.client.lease("train", release=True)) == {}
    assert it.device().budget_bytes == CAP * MIB
    error = it.client.error(it.client.lease("train", release=True))
    assert (error.code, error.reason) == (Code.NOT_FOUND, "no_such_lease")


def test_in_the_moment_of_its_end_a_message_that_comes_first_finds_it_over() -> None:
    it = Setting()
    it.held("train", 100, ttl_s=1)
    it.bench.now_ns += 1_000 * MS
    assert it.client.error(it.client.lease("train", release=True)).reason == "no_such_lease"
    it.held("again", 100, ttl_s=1)
    it.bench.now_ns += 1_000 * MS
    # Not a renewal: it is granted anew, with another size too.
    assert it.held("again", 200, ttl_s=1).bytes == 200 * MIB
    assert it.lines() == ["lease:local/again"]


# --- jobs and agents --------------------------------------------------------------------------


def test_jobs_that_do_not_fit_beside_it_wait_and_say_for_what_and_until_when() -> None:
    it = Setting()
    it.held("train", CAP - SMALL + 1, ttl_s=30)
    rid = it.client.decode("coder")
    job = it.job()
    assert (job.state, job.waiting, job.waiting_ms) == ("queued", "lease:local/train", 30_000)
    assert not it.worker.jobs
    it.bench.advance(30_000)
    it.worker.finish(it.worker.job("coder"))
    it.client.done(rid)


def test_who_waits_for_it_may_give_up_and_loses_nothing() -> None:
    it = Setting()
    it.held("train", CAP, ttl_s=30)
    late = it.client.decode("coder", queue_ms=2_000)
    dropped = it.client.decode("coder", timeout_ms=4_000)
    cancelled = it.client.decode("coder")
    it.client.send(m.Cancel(rid=cancelled))
    assert it.client.error(cancelled).reason == "cancelled"
    it.bench.advance(5_000)
    assert it.client.error(late).reason == "queue_timeout"
    assert it.client.error(dropped).reason == "timeout"
    assert not it.worker.jobs


def test_jobs_that_fit_beside_it_go_on() -> None:
    it = Setting()
    it.held("train", CAP - SMALL)
    rid = it.client.decode("coder")
    assert it.job().waiting == ""
    it.worker.finish(it.worker.job("coder"))
    it.client.done(rid)


def test_a_pool_that_is_there_anyway_is_not_shut_out() -> None:
    """The worker may have opened it smaller than it may become."""
    it = Setting()
    it.held("train", CAP - SMALL + 1)
    it.worker.residency(lines=[Line("pool:m-small@f16", 5 * MIB)])
    rid = it.client.decode("coder")
    it.worker.finish(it.worker.job("coder"))
    it.client.done(rid)


def test_jobs_that_were_sent_and_shut_out_do_not_keep_others_out() -> None:
    it = Setting("coder", worker_inflight=2)
    it.client.ok(it.client.register("tiny", "small", n_ctx=256))
    it.client.ok(it.client.register("large", "other", n_ctx=4096))
    stuck = [it.client.decode("large", conversation=f"c{i}") for i in range(2)]
    assert len(it.worker.jobs) == 2
    other = MODELS["other"]
    need = (other.weights_bytes + other.pool_bytes(4096)) // MIB
    assert need > SMALL
    it.held("train", CAP - need + 1)
    going = [it.client.decode("tiny", conversation=f"c{i}") for i in range(4)]
    assert len(it.worker.jobs) == 4
    for rid in going:
        job = next(job for job in it.worker.jobs.values() if job.run.conversation.agent == "tiny")
        it.worker.finish(job)
        it.client.done(rid)
    assert all(it.client.silent(rid) or not it.client.got(rid, m.Done) for rid in stuck)
    for job in list(it.worker.jobs.values()):
        it.worker.finish(job)
    assert [it.client.done(rid).generated_tokens for rid in stuck] == [2, 2]


def test_while_the_worker_is_away_jobs_wait_for_it_and_not_for_a_lease() -> None:
    it = Setting()
    it.held("train", CAP)
    it.client.decode("coder")
    it.bench.kill(it.worker)
    assert (it.job().waiting, it.job().waiting_ms) == ("worker", None)


def test_without_park_it_takes_only_what_nobody_was_promised() -> None:
    it = Setting()
    error = it.client.error(it.client.lease("train", (CAP - SMALL + 1) * MIB, park=False))
    assert (error.code, error.reason, error.retryable) == (
        Code.RESOURCE_EXHAUSTED,
        LEDGER_DENY,
        True,
    )
    assert error.details["short_by_bytes"] == 1 * MIB
    assert "unregister agents" in error.details["hint"]
    it.held("train", CAP - SMALL, park=False)
    it.client.decode("coder")
    assert it.job().waiting == ""


def test_agents_that_were_admitted_before_come_back_beside_it_after_a_restart() -> None:
    it = Setting()
    it.held("train", CAP, ttl_s=100)
    bench = it.bench = it.bench.restart()
    it.worker, it.client = bench.worker(epoch=2), bench.client()
    assert it.worker.all(c.Load)[0].budget_bytes == 0
    assert bench.core.report(bench.now_ns).agents[0].state == "ready"
    rid = it.client.decode("coder")
    assert it.job().waiting == "lease:local/train"
    assert it.client.error(it.client.register("new", "small", n_ctx=256)).reason == LEDGER_DENY
    bench.advance(100_000)
    it.worker.finish(it.worker.job("coder"))
    it.client.done(rid)


# --- refusals ---------------------------------------------------------------------------------


def test_a_lease_beyond_the_cap_without_the_base_can_never_be() -> None:
    bench = Bench()
    bench.worker(base_bytes=24 * MIB)
    client = bench.client()
    error = client.error(client.lease("train", (CAP - 24) * MIB + 1))
    assert (error.code, error.reason, error.retryable) == (Code.OUT_OF_RANGE, LEDGER_DENY, False)
    assert error.details["requested_bytes"] == (CAP - 24) * MIB + 1
    assert error.details["ledger_max_bytes"] == CAP * MIB
    assert error.details["ledger_allocated_bytes"] == 24 * MIB
    assert error.details["short_by_bytes"] == 1
    assert "lease train never fits" in error.message
    assert "ask for less" in error.message
    client.error(client.lease("train", limits.BYTES_MAX))
    assert bench.core.report(bench.now_ns).devices[0].leases == []


def test_other_leases_and_foreign_use_are_in_its_way_for_now() -> None:
    it = Setting()
    it.held("one", 500)
    error = it.client.error(it.client.lease("two", 525 * MIB))
    assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    assert error.details["short_by_bytes"] == 1 * MIB
    assert "release leases" in error.details["hint"]
    assert "unregister" not in error.details["hint"]
    it.held("two", 524)


def test_foreign_use_is_in_its_way_for_now() -> None:
    it = Setting()
    it.worker.residency(foreign_bytes=400 * MIB)
    error = it.client.error(it.client.lease("train", 625 * MIB))
    assert (error.code, error.retryable) == (Code.RESOURCE_EXHAUSTED, True)
    assert (error.details["foreign_bytes"], error.details["short_by_bytes"]) == (400 * MIB, 1 * MIB)
    assert "stop other programs" in error.details["hint"]
    rid = it.client.lease("train", 624 * MIB)
    it.bench.turn()
    it.worker.residency(foreign_bytes=400 * MIB)
    it.client.ok(rid)
    assert it.device().budget_bytes == 0
    # From now on, what grows is the holder's, as far as the lease goes.
    it.worker.residency(foreign_bytes=1000 * MIB)
    assert it.device().budget_bytes == 0
    it.worker.residency(foreign_bytes=500 * MIB)
    it.client.ok(it.client.lease("train", release=True))
    assert it.device().budget_bytes == 524 * MIB


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lease_bytes": 0}, "bad_value"),
        ({"lease_bytes": -1}, "bad_value"),
        ({"lease_bytes": limits.BYTES_MAX + 1}, "limit_exceeded"),
        ({"ttl_s": 0}, "bad_value"),
        ({"ttl_s": limits.LEASE_TTL_S_MAX + 1}, "limit_exceeded"),
        ({"name": ""}, "bad_name"),
        ({"name": "a/b"}, "bad_name"),
        ({"device": "cuda:7"}, "no_such_device"),
        ({"device": ""}, "bad_name"),
        ({"rid": b"short"}, "bad_rid"),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(fields: dict[str, Any], reason: str) -> None:
    it = Setting()
    before = it.device()
    given: dict[str, Any] = {"name": "train", "lease_bytes": 100 * MIB, **fields}
    assert it.client.error(it.client.lease(**given)).reason == reason
    assert it.device() == before
    assert len(it.worker.all(c.Budget)) == 1


def test_other_parameters_are_not_a_renewal() -> None:
    bench = Bench(
        config_of(*(DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity=CAP * MIB) for i in (0, 1)))
    )
    workers = [bench.worker(f"cpu:{i}") for i in (0, 1)]
    client = bench.client()
    rid = client.lease("train", 100 * MIB, device="cpu:1")
    changed: list[dict[str, Any]] = [
        {"lease_bytes": 101 * MIB},
        {"device": "cpu:0"},
        {"park": False},
        {"ephemeral": True},
    ]
    for changes in changed:
        for _ in ("pending", "held"):
            error = client.error(client.lease("train", **{"lease_bytes": 100 * MIB, **changes}))
            assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "lease_exists")
            (name,) = error.details["differences"]
            assert name == next(iter(changes)).removeprefix("lease_")
            assert f"differs in {name};" in error.message
            bench.turn()
            workers[1].residency()
    client.ok(rid)


def test_leases_are_counted() -> None:
    it = Setting()
    for index in range(limits.LEASES_PER_PRINCIPAL_MAX):
        it.held(f"l{index}", 1)
    error = it.client.error(it.client.lease("more", MIB))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "too_many_leases")
    assert error.details["limit"] == limits.LEASES_PER_PRINCIPAL_MAX
    # Renewing is not one more.
    it.client.ok(it.client.lease("l0", MIB))


def test_no_sample_no_lease() -> None:
    it = Setting(sample_max_age_ms=1000)
    it.bench.advance(5_000, alive=False, step_ms=500)
    error = it.client.error(it.client.lease("train", MIB))
    assert (error.reason, error.details["code"]) == (LEDGER_DENY, "STALE_SAMPLE")


# --- time and loss ----------------------------------------------------------------------------


def test_a_worker_that_does_not_come_down_costs_the_lease() -> None:
    it = Setting(lease_wait_ms=5_000)
    it.worker.own_bytes = 600 * MIB
    rid = it.client.lease("train", 500 * MIB)
    it.bench.advance(4_999)
    assert it.client.silent(rid) or not it.client.got(rid, m.Error)
    it.bench.advance(1)
    error = it.client.error(rid)
    assert (error.code, error.reason, error.retryable) == (
        Code.DEADLINE_EXCEEDED,
        "lease_timeout",
        True,
    )
    assert error.details == {
        "device": "cpu",
        "requested_bytes": 500 * MIB,
        "own_bytes": 600 * MIB,
        "budget_bytes": 524 * MIB,
        "short_by_bytes": 76 * MIB,
        "foreign_bytes": 0,
        "ledger_max_bytes": CAP * MIB,
        "waited_ms": 5_000,
        "confirmed": True,
    }
    assert it.lines() == []
    assert it.worker.all(c.Budget)[-1].budget_bytes == CAP * MIB


def test_a_worker_that_is_busy_and_confirms_too_late_gives_nothing_any_more() -> None:
    it = Setting(lease_wait_ms=5_000)
    it.worker.auto -= {c.Budget}
    rid = it.client.lease("train", 500 * MIB)
    late = it.worker.waiting(c.Budget)
    it.bench.advance(5_000)
    error = it.client.error(rid)
    assert (error.reason, error.details["confirmed"]) == ("lease_timeout", False)
    it.worker.answer(late)
    it.worker.residency()
    assert it.lines() == []
    # The name is free again.
    it.worker.auto |= {c.Budget}
    it.held("train", 400)


def test_foreign_use_that_grows_meanwhile_is_no_room() -> None:
    it = Setting()
    it.worker.own_bytes = 500 * MIB
    rid = it.client.lease("train", 500 * MIB)
    it.bench.turn()
    # Own use is known by difference: it went down, others' went up by as much.
    it.worker.own_bytes = 100 * MIB
    it.worker.residency(foreign_bytes=450 * MIB)
    assert not it.client.got(rid, m.Ok)
    it.worker.residency(foreign_bytes=424 * MIB)
    it.client.ok(rid)


def fail(it: Setting, budget: c.Budget) -> None:
    it.worker.fail(budget, Code.INTERNAL, "internal_error")


def wrong(it: Setting, budget: c.Budget) -> None:
    it.worker.reply(budget, c.Loaded)


def die(it: Setting, budget: c.Budget) -> None:
    it.bench.kill(it.worker)


def leave(it: Setting, budget: c.Budget) -> None:
    it.worker.fail(budget, Code.UNAVAILABLE, "worker_draining")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (fail, "internal_error"),
        (wrong, "bad_worker_reply"),
        (die, "worker_lost"),
        (leave, "worker_left"),
    ],
)
def test_what_goes_wrong_while_room_is_made_takes_it_back(
    harm: Callable[[Setting, c.Budget], None], reason: str
) -> None:
    it = Setting()
    it.worker.auto -= {c.Budget}
    rid = it.client.lease("train", 500 * MIB)
    harm(it, it.worker.waiting(c.Budget))
    assert it.client.error(rid).reason == reason
    assert it.lines() == []
    assert it.device().leases == []


def test_while_the_worker_is_away_none_is_granted_and_those_that_are_held_go_on() -> None:
    it = Setting()
    it.held("train", 500, ttl_s=10)
    it.bench.kill(it.worker)
    error = it.client.error(it.client.lease("other", MIB))
    assert (error.code, error.reason, error.retryable) == (Code.UNAVAILABLE, "no_worker", True)
    # Renewing needs nobody.
    it.client.ok(it.client.lease("train", 500 * MIB, ttl_s=10))
    new = it.bench.worker(epoch=2)
    assert new.all(c.Load)[0].budget_bytes == 524 * MIB
    it.bench.kill(new)
    it.bench.advance(10_000)
    assert it.lines() == []
    it.bench.worker(epoch=3)
    assert it.device().budget_bytes == CAP * MIB


def test_an_end_during_a_load_gives_the_next_load_the_whole_budget() -> None:
    it = Setting()
    it.held("train", 500, ttl_s=2)
    it.worker.auto -= {c.Load}
    rid = it.client.register("more", "small", n_ctx=256)
    load = it.worker.waiting(c.Load)
    assert load.budget_bytes == 524 * MIB
    it.bench.advance(2_000)
    assert it.worker.all(c.Budget)[-1].budget_bytes == CAP * MIB
    it.worker.answer(load)
    it.client.ok(rid)


def test_a_lease_during_a_load_does_not_undo_what_was_admitted() -> None:
    it = Setting()
    it.worker.auto -= {c.Load}
    it.worker.loaded_sizes = {"weights_bytes": MODELS["other"].weights_bytes + 5 * MIB}
    rid = it.client.register("more", "other", n_ctx=256)
    load = it.worker.waiting(c.Load)
    it.held("train", CAP)
    it.worker.answer(load)
    it.client.ok(rid)


def test_it_survives_the_broker_with_what_is_left_of_its_time() -> None:
    it = Setting()
    it.held("train", 500, ttl_s=60)
    it.held("gone", 100, ttl_s=60, ephemeral=True)
    it.held("over", 100, ttl_s=15)
    it.held("released", 100)
    it.client.ok(it.client.lease("released", release=True))
    it.bench.advance(20_000)
    it.bench = it.bench.restart()
    it.bench.tick()
    worker = it.bench.worker(epoch=2)
    assert worker.all(c.Load)[0].budget_bytes == 524 * MIB
    (lease,) = it.device().leases
    assert (lease.name, lease.left_ms, lease.state) == ("train", 39_999, "held")
    client = it.bench.client()
    client.ok(client.lease("train", 500 * MIB, ttl_s=60))
    it.bench.advance(60_000)
    assert it.lines() == []


def test_a_clock_that_was_set_back_does_not_make_it_longer() -> None:
    it = Setting()
    it.held("train", 500, ttl_s=60)
    record = next(x for x in it.bench.records if isinstance(x, LeaseHeld))
    far = record.ends_unix_ns + 10**18
    it.bench.records.append(
        LeaseHeld(
            principal="local",
            name="train",
            device="cpu",
            bytes=500 * MIB,
            ttl_s=60,
            ends_unix_ns=far,
        )
    )
    it.bench = it.bench.restart()
    (lease,) = it.device().leases
    assert lease.left_ms == 60_000


def test_of_a_device_that_is_configured_no_longer_nothing_is_left() -> None:
    it = Setting()
    it.held("train", 500, ttl_s=60)
    it.bench.config = config_of(DeviceConfig(id="cpu:9", kind="cpu", capacity=CAP * MIB))
    it.client = it.bench.restart().client()
    error = it.client.error(it.client.lease("train", release=True))
    assert error.reason == "no_such_lease"


def test_a_broker_that_leaves_grants_nothing_and_still_takes_back() -> None:
    it = Setting()
    it.held("train", 100)
    it.worker.auto -= {c.Budget}
    rid = it.client.lease("more", 100 * MIB)
    it.client.decode("coder")
    it.bench.shut_down(5000)
    assert it.client.error(rid).reason == "draining"
    assert it.client.error(it.client.lease("more", 100 * MIB)).reason == "draining"
    it.client.ok(it.client.lease("train", release=True))


# --- who asks ---------------------------------------------------------------------------------


def test_an_ephemeral_one_ends_with_the_last_session_that_asked_for_it() -> None:
    it = Setting()
    it.held("train", 100, ephemeral=True)
    second = it.bench.client("c2")
    second.ok(second.lease("train", 100 * MIB, ephemeral=True))
    it.client.send(m.Bye())
    assert it.lines()
    second.gone()
    assert it.lines() == []
    assert not any(isinstance(record, LeaseHeld | LeaseEnded) for record in it.bench.records)


def test_one_that_is_not_outlives_its_session() -> None:
    it = Setting()
    it.held("train", 100)
    it.client.send(m.Bye())
    assert it.lines()


@pytest.mark.parametrize("how", ["bye", "gone", "cancel"])
def test_nobody_waits_any_more_and_it_is_withdrawn(how: str) -> None:
    it = Setting()
    it.worker.auto -= {c.Budget}
    rid = it.client.lease("train", 100 * MIB)
    if how == "cancel":
        stranger = it.bench.client("c9", "other")
        stranger.send(m.Cancel(rid=rid))
        assert it.lines()
        it.client.send(m.Cancel(rid=rid))
        assert it.client.error(rid).reason == "cancelled"
    elif how == "bye":
        it.client.send(m.Bye())
    else:
        it.client.gone()
    assert it.lines() == []
    it.worker.answer(it.worker.held[0])
    it.worker.residency()
    assert it.lines() == []


def test_of_several_who_wait_one_may_leave() -> None:
    it = Setting()
    it.worker.auto -= {c.Budget}
    first = it.client.lease("train", 100 * MIB)
    second = it.bench.client("c2")
    rid = second.lease("train", 100 * MIB, ttl_s=30)
    second.lease("train", 100 * MIB, ttl_s=30, rid=rid)
    it.client.send(m.Cancel(rid=first))
    it.bench.turn()
    it.worker.answer(it.worker.held[0])
    it.worker.residency()
    assert status_of(second.ok(rid)).left_ms == 30_000
    assert it.lines()


def test_a_release_while_room_is_made_tells_those_who_wait() -> None:
    it = Setting()
    it.worker.auto -= {c.Budget}
    rid = it.client.lease("train", 100 * MIB)
    it.client.ok(it.client.lease("train", release=True))
    error = it.client.error(rid)
    assert (error.code, error.reason) == (Code.CANCELLED, "lease_released")
    assert it.lines() == []


def test_two_principals_may_use_one_name_and_do_not_see_each_other() -> None:
    it = Setting()
    other = it.bench.client("c2", "other")
    it.held("train", 100, ttl_s=50)
    rid = other.lease("train", 300 * MIB, ttl_s=20)
    it.bench.turn()
    it.worker.residency()
    other.ok(rid)
    assert it.lines() == ["lease:local/train", "lease:other/train"]

    def seen(client: Client) -> tuple[list[str], list[tuple[str, int]]]:
        rid = it.bench.rid()
        client.send(m.Status(rid=rid))
        device = client.ok(rid)["devices"][0]
        lines = [(x["key"], x["bytes"]) for x in device["promised"]["lines"]]
        leases = [f"{x['principal']}/{x['name']}" for x in device["leases"]]
        return leases, [line for line in lines if line[0].startswith("lease")]

    assert seen(other) == (
        ["other/train"],
        [("lease:other/train", 300 * MIB), ("lease:others", 100 * MIB)],
    )
    assert seen(it.client)[0] == ["local/train"]
    error = other.error(other.lease("more", CAP * MIB))
    assert "local/train" not in str(error)
    it.client.ok(it.client.lease("train", release=True))
    assert it.lines() == ["lease:other/train"]
    # What a job waits for is not named, either; when it ends, is.
    rid = other.lease("big", (CAP - 300) * MIB)
    it.bench.turn()
    it.worker.residency()
    other.ok(rid)
    it.client.decode("coder")
    rid = it.bench.rid()
    it.client.send(m.Status(rid=rid))
    (job,) = it.client.ok(rid)["jobs"]
    assert (job["waiting"], job["waiting_ms"]) == ("lease:others", 19_999)


def test_without_a_device_it_goes_where_the_most_is_left() -> None:
    bench = Bench(
        config_of(*(DeviceConfig(id=f"cpu:{i}", kind="cpu", capacity=CAP * MIB) for i in (0, 1, 2)))
    )
    workers = [bench.worker(f"cpu:{i}") for i in (0, 1)]
    client = bench.client()
    client.ok(client.register("coder", device="cpu:0"))

    def lease(name: str, size: int) -> str:
        rid = client.lease(name, size * MIB)
        bench.turn()
        for worker in workers:
            worker.residency()
        device: str = client.ok(rid)["device"]
        return device

    assert lease("one", 500) == "cpu:1"
    assert lease("two", 500) == "cpu:0"
    # Agents of cpu:0 would be in its way, but only there is so much without other leases.
    assert lease("three", 524) == "cpu:1"
    assert lease("four", 524) == "cpu:0"
