"""Roles, quotas and revoked keys in the broker's core, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from keyed_client import Keyed
from scripted_worker import MIB, Bench, Client, ScriptedWorker

from vram_conductor.broker.events import KeysChanged, WorkerGone, WorkerMessageIn
from vram_conductor.broker.permissions import check_quota, held_bytes
from vram_conductor.protocol import limits, resume
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.commands import Budget, Estimate, Load, Ready
from vram_conductor.protocol.errors import Code, ConductorError, OutOfRange, ResourceExhausted
from vram_conductor.protocol.keys import Quota

HELLO = m.Hello(v=(limits.PROTOCOL_MAJOR, limits.PROTOCOL_MINOR))


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.worker()
    return bench


def keys(bench: Bench, quotas: dict[str, Quota] | None = None, **principals: str) -> None:
    bench.post(KeysChanged(quotas or {}, principals))


def test_a_role_may_change_while_its_holder_is_connected(bench: Bench) -> None:
    alice = Keyed(bench, "k1", "alice")
    alice.ok(alice.register("coder"))
    alice.role = "observer"
    error = alice.error(alice.decode("coder"))
    assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "role_denied")
    assert error.details == {"role": "observer", "request": "DECODE"}
    alice.role = "owner"
    rid = alice.decode("coder")
    assert alice.got(rid, m.Accepted)


def test_an_admin_sees_everybody_and_an_owner_what_is_its_own(bench: Bench) -> None:
    alice, root = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "root", "admin")
    alice.ok(alice.register("coder"))
    for client, agents in ((alice, ["alice"]), (root, ["alice"]), (Keyed(bench, "k3", "bob"), [])):
        rid = bench.rid()
        client.send(m.Status(rid=rid))
        assert [agent["principal"] for agent in client.ok(rid).get("agents", [])] == agents


def test_a_revoked_session_is_told_and_its_jobs_stop(bench: Bench) -> None:
    alice, bob = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "bob")
    local = Client(bench, b"ipc")
    local.send(HELLO)
    for client in (alice, bob):
        client.ok(client.register("coder"))
    alice.decode("coder")
    alice.ok(alice.register("mine", ephemeral=True))
    keys(bench, k1="alice", k2="bob")
    assert not alice.got(b"", m.Error)
    keys(bench, k2="bob")
    (told,) = alice.got(b"", m.Error)
    assert (told.error.code, told.error.reason) == (Code.UNAUTHENTICATED, "key_revoked")
    rid = alice.register("other")
    assert alice.error(rid).reason == "no_session"
    undisturbed: list[Client] = [bob, local]
    for other in undisturbed:
        assert not other.got(b"", m.Error)
        rid = bench.rid()
        other.send(m.List(rid=rid))
        other.ok(rid)
    admin = Keyed(bench, "k3", "root", "admin")
    rid = bench.rid()
    admin.send(m.Status(rid=rid))
    report = admin.ok(rid)
    (worker,) = bench.workers.values()
    assert len(worker.cancelled()) == 1
    assert [(a["principal"], a["agent"]) for a in report["agents"]] == [
        ("alice", "coder"),
        ("bob", "coder"),
    ]


class KeyedWorker(ScriptedWorker):
    """A worker with a key, whose session can go on after a cut."""

    def say(self, message: Any, raw: Sequence[bytes] = ()) -> None:
        if isinstance(message, Ready):
            message = msgspec.structs.replace(message, features=[resume.FEATURE])
        self.bench.post(WorkerMessageIn(self.peer, message, list(raw), key=f"k{self.epoch}"))


def keyed_worker(bench: Bench, epoch: int) -> KeyedWorker:
    worker = KeyedWorker(bench, epoch=epoch)
    bench.workers[worker.peer] = worker
    worker.ready()
    return worker


def test_a_worker_whose_key_is_revoked_is_not_waited_for() -> None:
    """Neither the one that serves, though it could come back, nor the one that would like to."""
    bench = Bench()
    device = bench.core._state.devices["cpu"]
    keys(bench, k1="w", k2="w", k3="w")
    first = keyed_worker(bench, 1)
    keyed_worker(bench, 2)
    assert device.candidate is not None
    keys(bench, k1="w", k3="w")
    assert device.candidate is None
    assert device.link is not None
    bench.post(WorkerGone(first.peer))
    assert device.link is not None, "it may come back"
    keys(bench, k3="w", k4="w")
    assert device.link is None
    assert keyed_worker(bench, 3).welcome is not None
    keys(bench, k3="w")
    assert device.link.epoch == 3


def test_a_key_that_stands_for_somebody_else_now_is_another_key(bench: Bench) -> None:
    alice = Keyed(bench, "k1", "alice")
    keys(bench, k1="bob")
    assert alice.got(b"", m.Error)


def test_a_jobs_number_tells_nothing_of_the_jobs_of_others(bench: Bench) -> None:
    alice, bob = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "bob")
    root = Keyed(bench, "k3", "root", "admin")
    told: dict[str, list[int]] = {"alice": [], "bob": []}
    for client in (alice, bob):
        client.ok(client.register("coder"))
    for client in (alice, bob, bob, alice, bob):
        rid = client.decode("coder", "hello")
        told[client.principal].append(client.got(rid, m.Accepted)[0].job)
    assert told == {"alice": [1, 2], "bob": [1, 2, 3]}
    for client, expected in ((alice, [("alice", 1), ("alice", 2)]), (root, 5)):
        rid = bench.rid()
        client.send(m.Status(rid=rid))
        jobs = [(job["principal"], job["job"]) for job in client.ok(rid)["jobs"]]
        assert (sorted(jobs) if client is alice else len(set(jobs))) == expected


def test_nobody_cancels_what_another_waits_for(bench: Bench) -> None:
    """A REGISTER and a LEASE under way, by their rids."""
    alice, bob = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "bob")
    for worker in bench.workers.values():
        worker.auto.clear()  # nothing is answered before the test says so
    register, lease = alice.register("coder"), bench.rid()
    alice.send(m.Lease(rid=lease, name="gpu", lease_bytes=MIB))
    for rid in (register, lease):
        bob.send(m.Cancel(rid=rid))
        assert bob.error(rid).reason == "unknown_rid"
        assert not alice.got(rid, m.Error)
    (worker,) = bench.workers.values()
    worker.auto = {Estimate, Load, Budget}
    for command in list(worker.held):
        worker.answer(command)
    assert alice.ok(register)["agent"] == "coder"
    alice.send(m.Cancel(rid=lease))
    assert alice.error(lease).reason == "cancelled"


def test_an_admin_ends_the_leases_of_others_and_nobody_else_does(bench: Bench) -> None:
    alice, bob = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "bob")
    root = Keyed(bench, "k3", "root", "admin")
    eye = Keyed(bench, "k4", "alice", "observer")

    def end(client: Keyed, principal: str | None, name: str = "gpu") -> bytes:
        rid = bench.rid()
        client.send(m.Lease(rid=rid, name=name, principal=principal))
        return rid

    (worker,) = bench.workers.values()
    for client in (alice, bob):
        rid = client.lease("gpu", 8 * MIB)
        worker.residency()
        client.ok(rid)
    for client in (bob, eye):
        error = client.error(end(client, "alice"))
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "role_denied")
        assert error.details["request"] == "LEASE"
    assert root.error(end(root, "alice", "other")).reason == "no_such_lease"
    root.ok(end(root, "alice"))
    assert {key.principal for key in bench.core._state.leases} == {"bob"}
    bob.ok(end(bob, "bob"))
    assert not bench.core._state.leases
    # One that agents still make room for: whoever waits for it is told.
    rid = alice.lease("gpu", 8 * MIB)
    root.ok(end(root, "alice"))
    assert alice.error(rid).reason == "lease_released"


def test_a_principal_has_so_many_sessions_and_leaves_the_others_theirs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vram_conductor.protocol.limits.SESSIONS_PER_KEYED_PRINCIPAL_MAX", 2)

    def refused(name: str, principal: str, key: str = "k") -> bool:
        client = Keyed(bench, f"{key}-{name}", principal)
        errors = client.got(b"", m.Error)
        assert all(error.error.reason == "too_many_sessions" for error in errors)
        assert all(error.error.details["limit"] == 2 for error in errors)
        return bool(errors)

    assert [refused(name, "alice") for name in "abc"] == [False, False, True]
    assert [refused(name, "bob") for name in "de"] == [False, False]
    gone = Client(bench, b"k-a", "alice")
    gone.gone()
    assert not refused("f", "alice")
    assert refused("g", "alice")
    local = [Client(bench, f"ipc{number}".encode()) for number in range(4)]
    for client in local:
        client.send(HELLO)
        assert not client.got(b"", m.Error), "without a key there is one principal only"


def test_agents_on_their_way_count(bench: Bench) -> None:
    keys(bench, {"alice": Quota(agents=2)}, k1="alice")
    alice = Keyed(bench, "k1", "alice")
    for worker in bench.workers.values():
        worker.dead = True  # nothing is answered: both registrations stay under way
    alice.register("one")
    alice.register("two")
    error = alice.error(alice.register("three"))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "quota_exceeded")
    assert error.details["used"] == 2


def test_a_quota_that_shrinks_takes_nothing_away(bench: Bench) -> None:
    alice = Keyed(bench, "k1", "alice")
    alice.ok(alice.register("coder"))
    keys(bench, {"alice": Quota(agents=0, vram_bytes=0, kv_bytes=0, queued_jobs=0)}, k1="alice")
    alice.ok(alice.register("coder"))
    assert alice.error(alice.decode("coder")).reason == "quota_exceeded"
    error = alice.error(alice.register("other"))
    assert (error.code, error.retryable) == (Code.OUT_OF_RANGE, False)
    keys(bench, k1="alice")
    rid = alice.decode("coder")
    assert alice.got(rid, m.Accepted)


def test_what_is_shared_counts_for_each_and_what_is_refused_for_nobody(bench: Bench) -> None:
    alice, bob = Keyed(bench, "k1", "alice"), Keyed(bench, "k2", "bob")
    alice.ok(alice.register("one", n_ctx=1024))
    state = bench.core._state
    one = held_bytes(state, "alice")
    assert one[0] > 0
    assert one[1] > 0
    bob.ok(bob.register("one", n_ctx=1024))
    assert held_bytes(state, "alice") == one
    assert held_bytes(state, "bob") == one
    keys(bench, {"bob": Quota(vram_bytes=one[0])}, k1="alice", k2="bob")
    refused = bob.error(bob.register("two", n_ctx=4096))
    assert refused.details["field"] == "vram_bytes"
    assert held_bytes(state, "bob") == one
    assert refused.details["used"] + refused.details["requested"] > one[0]
    bob.ok(bob.register("two", n_ctx=1024))  # the same pool in turn: not a byte more
    assert held_bytes(state, "bob") == (one[0], 2 * one[1])


def test_never_and_not_now_differ() -> None:
    check_quota("alice", "agents", 1, 1, 2)
    check_quota("alice", "agents", 10**9, 1, None)
    with pytest.raises(ResourceExhausted) as later:
        check_quota("alice", "agents", 2, 1, 2)
    assert later.value.retryable
    with pytest.raises(OutOfRange) as never:
        check_quota("alice", "vram_bytes", 0, 3, 2)
    assert not never.value.retryable


def test_bytes_are_said_in_units_that_people_read() -> None:
    with pytest.raises(ConductorError) as caught:
        check_quota("bob", "vram_bytes", 150 << 20, 100 << 20, 200 << 20)
    said = "bob may have 200 MiB of vram_bytes, has 150 MiB, and asks for 100 MiB more; "
    assert caught.value.info.message.startswith(said)
    assert caught.value.details["limit"] == 200 << 20
    with pytest.raises(ConductorError, match="bob may have 1024 agents, has 1024, and asks for 1"):
        check_quota("bob", "agents", 1024, 1, 1024)
