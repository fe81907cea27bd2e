"""The core under random clients and workers: crashes, restarts, duplicates, reorderings.

After every event the core's invariants hold, the journal folds to exactly what the core knows,
nothing is sent to a peer that is gone, and nothing of a stale attempt reaches a client. At the end
every job has had exactly one terminal message, and a restart brings everything back.

The actions are one list of numbers, so that hypothesis can shorten it; a state machine with a rule
per action hardly ever gets a job to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import MIB, MS, PRINCIPAL, Bench, Client, Job, ScriptedWorker, config_of

from vram_conductor.broker.effects import SendClient, SendWorker
from vram_conductor.broker.events import ClientFlow, WorkerMessageIn
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.registry import Agent
from vram_conductor.protocol import commands as c
from vram_conductor.protocol import limits
from vram_conductor.protocol import messages as m
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.values import AgentKey, ConversationKey

T = TypeVar("T")
DEVICES = ("cpu:0", "cpu:1")
TOTAL = 260 * MIB
NOT_OF_THE_JOB = {"unknown_rid", "rid_reused", "resume_out_of_range", "no_session"}
STALE = "STALE"
HOLDABLE = {c.Load, c.Estimate, c.Unload, c.Budget, c.Copy}


class Choice:
    """Decisions read off one number; smaller numbers take the first options."""

    def __init__(self, number: int) -> None:
        self._rest = number

    def of(self, options: Sequence[T]) -> T:
        self._rest, index = divmod(self._rest, len(options))
        return options[index]


class Machine:
    """Random peers around one core."""

    def __init__(self) -> None:
        self.bench = Bench(
            config_of(
                *(DeviceConfig(id=name, kind="cpu", capacity=TOTAL) for name in DEVICES),
                worker_inflight=2,
                queued_jobs_per_agent_max=4,
                result_keep_ms=20_000,
                estimate_timeout_ms=5_000,
                load_timeout_ms=10_000,
            )
        )
        self.state = self.bench.core._state
        self.epoch = 0
        self.names = 0
        self.workers: dict[str, ScriptedWorker] = {}
        self.clients = [self.new_client() for _ in range(3)]
        self.decodes: list[m.Decode] = []
        self.others: list[bytes] = []
        self.old_runs: list[tuple[ScriptedWorker, c.Run]] = []
        self.terminals: dict[bytes, Any] = {}
        self.versions: dict[ConversationKey, tuple[Agent, int, bytes]] = {}
        self.bench.watch = self.watch
        for device in DEVICES:
            self.start_worker(device, holds=False)
        for index, agent in enumerate("abd"):
            self.clients[index].ok(self.clients[index].register(agent, "small", 512))

    def new_client(self) -> Client:
        self.names += 1
        return self.bench.client(f"c{self.names}")

    def start_worker(self, device: str, *, holds: bool) -> None:
        self.epoch += 1
        worker = self.bench.worker(
            device, epoch=self.epoch, total_bytes=TOTAL, base_bytes=1 * MIB, ready=False
        )
        self.workers[device] = worker
        if holds:
            worker.auto -= HOLDABLE
        worker.ready()

    # --- what clients do ----------------------------------------------------------------------

    def register(self, pick: Choice) -> None:
        rid = self.bench.rid()
        self.others.append(rid)
        pick.of(self.clients).register(
            pick.of("abde"),
            pick.of(["small", "small", "other", "none"]),
            pick.of([512, 1024, 4096]),
            slots=pick.of([1, 2]),
            ephemeral=pick.of([False, False, True]),
            ttl_s=pick.of([None, None, 5]),
            rid=rid,
        )

    def unregister(self, pick: Choice) -> None:
        self.others.append(pick.of(self.clients).unregister(pick.of("abde")))

    def reset(self, pick: Choice) -> None:
        self.others.append(pick.of(self.clients).reset(pick.of("abde"), pick.of(["main", "side"])))

    def fork(self, pick: Choice) -> None:
        fresh = pick.of([True, True, False]) or not self.others
        rid = self.bench.rid() if fresh else self.others[-1]
        source, copy = pick.of([("main", "side"), ("side", "main"), ("main", "third")])
        pick.of(self.clients).fork(pick.of("abde"), copy, source, rid=rid)
        self.others.append(rid)

    def forget(self, pick: Choice) -> None:
        agent, name = pick.of("abde"), pick.of(["third", "side"])
        self.others.append(pick.of(self.clients).reset(agent, name, forget=True))
        key = ConversationKey(PRINCIPAL, agent, name)
        if self.state.registry.conversation(key) is None:
            self.versions.pop(key, None)

    def history(self, pick: Choice) -> None:
        rid = pick.of(self.clients).history(pick.of("abde"), from_token=pick.of([0, 3, None]))
        self.others.append(rid)

    def fit(self, pick: Choice) -> None:
        rid = self.bench.rid()
        self.others.append(rid)
        model, device = pick.of(["small", "other", "none"]), pick.of([None, *DEVICES])
        pick.of(self.clients).send(Fit(rid=rid, model=model, device=device, slots=pick.of([1, 2])))

    def cancel_register(self, pick: Choice) -> None:
        if self.others:
            pick.of(self.clients).send(m.Cancel(rid=pick.of(self.others[-3:])))

    def lease(self, pick: Choice) -> None:
        rid = self.bench.rid()
        self.others.append(rid)
        pick.of(self.clients).lease(
            pick.of("xy"),
            pick.of([80, 80, 200, 259, 260]) * MIB,
            ttl_s=pick.of([5, 1, 60]),
            device=pick.of([None, *DEVICES]),
            park=pick.of([True, True, False]),
            ephemeral=pick.of([False, False, True]),
            release=pick.of([False, False, False, True]),
            rid=rid,
        )

    def decode(self, pick: Choice) -> None:
        message = m.Decode(
            rid=self.bench.rid(),
            agent=pick.of("abde"),
            conversation=pick.of(["main", "main", "side"]),
            prompt="x",
            window=pick.of([None, None, 0, 1]),
            detach=pick.of([False, False, True]),
            expect_version=pick.of([None, None, None, 0, 1]),
            queue_ms=pick.of([None, None, 1500]),
            timeout_ms=pick.of([None, None, 2500]),
            priority=pick.of([None, 1, -1]),
        )
        self.decodes.append(message)
        pick.of(self.clients).send(message)

    def follow_up(self, pick: Choice) -> None:
        """Something about a recent job, by anybody."""
        if not self.decodes:
            return
        message = pick.of(self.decodes[-6:])
        client, number = pick.of(self.clients), pick.of(range(4))
        match pick.of(["again", "cancel", "resume", "credit"]):
            case "again":
                # Only what was accepted is idempotent; a refused request is a new one.
                if self.state.jobs.by_rid("local", message.rid) is not None:
                    client.send(message)
            case "cancel":
                client.send(m.Cancel(rid=message.rid))
            case "resume":
                client.send(m.Resume(rid=message.rid, from_seq=number))
            case _:
                client.send(m.Credit(rid=message.rid, ack=number, upto=number + 1))

    def leave(self, pick: Choice) -> None:
        index = pick.of(range(3))
        client = self.clients[index]
        match pick.of(["gone", "bye", "hello"]):
            case "hello":
                client.send(m.Hello(v=(1, 0)))
                return
            case "gone":
                client.gone(dead=pick.of([False, True]))
            case _:
                client.send(m.Bye())
                self.bench.gone.add(client.peer)
        self.clients[index] = self.new_client()

    def fall_behind(self, pick: Choice) -> None:
        """A client does not read, or reads again."""
        peer = pick.of(self.clients).peer
        self.bench.post(ClientFlow(peer, behind=pick.of([True, False])))

    # --- what workers do ----------------------------------------------------------------------

    def restart_worker(self, pick: Choice) -> None:
        device = pick.of(DEVICES)
        old = self.workers[device]
        if pick.of([True, True, True, False]):
            # Until its end is noticed, what it sent may still arrive and counts.
            self.old_runs += [(old, job.run) for job in old.jobs.values()]
            self.bench.kill(old)
        old.dead = True
        self.bench.advance(pick.of([0, 1500]), alive=False)
        self.start_worker(device, holds=pick.of([False, True]))

    def drain(self, pick: Choice) -> None:
        """An operator asks a worker to leave, or the same again."""
        fresh = pick.of([True, True, False]) or not self.others
        client = pick.of(self.clients)
        client.role = pick.of(["admin", "admin", "owner"])
        rid = self.bench.rid() if fresh else self.others[-1]
        self.others.append(rid)
        device = pick.of(DEVICES)
        drain_ms, hold_ms = pick.of([None, 0, 40_000]), pick.of([0, 35_000])
        client.drain(device, drain_ms=drain_ms, hold_ms=hold_ms, rid=rid)
        client.role = "owner"

    def leave_drained(self, pick: Choice) -> None:
        """A worker that was asked to leave does so: what it had is given back, or ended."""
        for device, worker in self.workers.items():
            if worker.dead or worker.welcome is None or not worker.all(c.Drain):
                continue
            for job in list(worker.jobs.values()):
                if pick.of([True, False]):
                    worker.jobs.pop(job.run.op)
                    worker.fail(job.run, Code.UNAVAILABLE, "worker_draining")
            worker.dead = True
            worker.say(c.WorkerBye(worker_epoch=worker.epoch))
            if pick.of([True, True, False]):
                self.start_worker(device, holds=pick.of([False, True]))

    def hold_answers(self, pick: Choice) -> None:
        """From now on a worker answers at once, or when and how the test says."""
        worker = self.workers[pick.of(DEVICES)]
        worker.auto = worker.auto - HOLDABLE if pick.of([True, False]) else worker.auto | HOLDABLE

    def say_ready_again(self, pick: Choice) -> None:
        worker = self.workers[pick.of(DEVICES)]
        if not worker.dead and not worker.refused:
            self.old_runs += [(worker, job.run) for job in worker.jobs.values()]
            worker.jobs.clear()
            worker.held.clear()
            worker.ready()

    def restart_broker(self, pick: Choice) -> None:
        """kill -9 of the broker: workers and clients find a new one, with the journal."""
        before = self.bench
        self.bench = before.restart()
        self.state = self.bench.core._state
        self.bench.watch = self.watch
        self.clients = [self.new_client() for _ in range(3)]
        self.decodes.clear()
        self.others.clear()
        self.terminals.clear()
        for worker in self.workers.values():
            self.old_runs += [(worker, job.run) for job in worker.jobs.values()]
            worker.jobs.clear()
            worker.held.clear()
            worker.bench = self.bench
            worker.welcome = None
            worker.seq = 0
            if not worker.dead:
                self.bench.workers[worker.peer] = worker
                if pick.of([True, True, False]):
                    worker.ready()
                else:
                    worker.ping()

    def held(self) -> list[tuple[ScriptedWorker, Any]]:
        return [(w, x) for w in self.workers.values() if not w.dead for x in w.held]

    def answer(self, pick: Choice) -> None:
        held = self.held()
        if not held:
            return
        worker, command = pick.of(held)
        if pick.of([True, True, True, True, False]):
            worker.answer(command)
        else:
            worker.fail(command, Code.INTERNAL, "it_failed")
        if pick.of([False, False, True]):
            worker.answer(command)

    def answer_all(self, pick: Choice) -> None:
        for worker, command in self.held():
            if command in worker.held:
                worker.answer(command)

    def jobs(self) -> list[tuple[ScriptedWorker, Job]]:
        return [(w, job) for w in self.workers.values() if not w.dead for job in w.jobs.values()]

    def work(self, pick: Choice) -> None:
        jobs = self.jobs()
        if not jobs:
            return
        worker, job = pick.of(jobs)
        if not job.started:
            keep = len(job.transcript) - pick.of([0, 0, 1, 3])
            worker.start(job, [1, 2], keep=max(0, keep))
            return
        match pick.of(["tokens", "tokens", "ids", "done", "fail", "forget"]):
            case "tokens":
                worker.tokens(job, "t", [5])
            case "ids":
                worker.tokens(job, "", [6])
            case "forget":
                worker.transcripts.clear()
            case "fail":
                worker.jobs.pop(job.run.op)
                worker.fail(job.run, Code.INTERNAL, "decode_failed")
            case _:
                stopped = job.run.op in worker.cancelled()
                worker.done(job, "cancelled" if stopped else "eos")

    def finish(self, pick: Choice) -> None:
        jobs = self.jobs()
        if jobs:
            worker, job = pick.of(jobs)
            worker.finish(job, "e", [8])

    def stale(self, pick: Choice) -> None:
        """A reply of an earlier life, over the old connection or the new one."""
        if not self.old_runs:
            return
        worker, run = pick.of(self.old_runs)
        ids: dict[str, Any] = {
            "broker_epoch": run.broker_epoch,
            "op": run.op,
            "worker_epoch": worker.epoch,
        }
        message: Any = pick.of(
            [
                c.Started(**ids, job=run.job, keep=0),
                c.RunTokens(**ids, job=run.job, text=STALE, ids=[9]),
                c.Failed(**ids, job=run.job, error=ErrorInfo(Code.INTERNAL, STALE, "x")),
            ]
        )
        new = self.workers[worker.device]
        peer = new.peer if pick.of([True, False]) and not new.dead else worker.peer
        raw = [b""] if isinstance(message, c.Started) else []
        self.bench.post(WorkerMessageIn(peer, message, raw))

    def residency(self, pick: Choice) -> None:
        worker = self.workers[pick.of(DEVICES)]
        if not worker.dead and worker.welcome and not worker.refused:
            worker.residency(foreign_bytes=pick.of([0, 100 * MIB, 300 * MIB]))

    def time(self, pick: Choice) -> None:
        self.bench.advance(pick.of([100, 500, 1000, 3000]), step_ms=1000)
        self.reconnect()

    def long_time(self, pick: Choice) -> None:
        if pick.of([True, False]):
            self.bench.advance(31_000, step_ms=2000)
        else:
            self.bench.now_ns += pick.of([4_000, 31_000]) * MS
            self.bench.tick()
        self.reconnect()

    def reconnect(self) -> None:
        """Clients whose session the broker has given up come back."""
        for index, client in enumerate(self.clients):
            if self.state.sessions.find(client.peer) is None:
                self.bench.gone.add(client.peer)
                self.clients[index] = self.new_client()

    # --- what must hold -----------------------------------------------------------------------

    def watch(self, effect: SendClient | SendWorker) -> None:
        """Look at every message that leaves."""
        message = effect.message
        if isinstance(message, m.Tokens):
            assert STALE not in message.text
        if isinstance(message, m.Error):
            assert message.error.reason != STALE
        if isinstance(message, m.Done) or (
            isinstance(message, m.Error) and message.error.reason not in NOT_OF_THE_JOB
        ):
            known = self.terminals.setdefault(message.rid, message)
            # A second delivery is the same message, to another connection.
            assert known == message or message.rid in self.others

    def check(self) -> None:
        self.journal_is_what_the_core_knows()
        for agent in self.state.registry:
            for conversation in agent.conversations.values():
                now = bytes(conversation.transcript)
                seen = self.versions.get(conversation.key)
                if seen is not None and seen[0] is agent and seen[1] <= conversation.version:
                    assert conversation.version > seen[1] or now == seen[2]
                elif seen is not None and seen[0] is agent:
                    # Only a conversation that never got a token may be forgotten.
                    raise AssertionError("a version went back")
                self.versions[conversation.key] = (agent, conversation.version, now)
        for device in self.state.devices.values():
            ledger = device.ledger
            if device.info is None:
                continue  # its size is not known yet; leases of the journal are there already
            parked = sum(x.bytes for x in ledger.leases() if x.park)
            assert ledger.promised_bytes - parked <= ledger.cap_bytes
            assert ledger.base_bytes + ledger.leases_bytes <= ledger.cap_bytes

    def journal_is_what_the_core_knows(self) -> None:
        restored = Restored()
        for record in self.bench.records:
            restored.apply(record)
        agents = {a.key: a for a in self.state.registry}
        assert set(restored.agents) == set(agents)
        assert set(restored.used_unix_ns) == {key for key, a in agents.items() if a.spec.ttl_s}
        for key, agent in agents.items():
            assert restored.agents[key].spec == agent.spec
            if agent.spec.ttl_s and not agent.busy:
                assert restored.used_unix_ns[key] == agent.used_ns
            for conversation in agent.conversations.values():
                saved = restored.conversations.get(conversation.key)
                if saved is None:
                    assert (conversation.version, bytes(conversation.transcript)) == (0, b"")
                else:
                    assert saved.version == conversation.version
                    assert saved.transcript == conversation.transcript
                    assert saved.turns == conversation.turns
        held = {
            (key.principal, key.name): (tenure.size_bytes, tenure.ttl_s)
            for key, tenure in self.state.leases.items()
            if tenure.expires_ns is not None and not tenure.ephemeral
        }
        assert {key: (x.bytes, x.ttl_s) for key, x in restored.leases.items()} == held

    def finish_everything(self) -> None:
        for worker in self.workers.values():
            if not worker.dead:
                self.bench.kill(worker)
        self.bench.advance(40_000, step_ms=2000)
        assert not list(self.state.jobs.live())
        assert not len(self.state.queue)
        assert not len(self.bench.core._agents.registration)
        assert not len(self.bench.core._agents.lobby)
        assert not len(self.bench.core._agents.fits)
        assert all(tenure.expires_ns for tenure in self.state.leases.values())
        for device in self.state.devices.values():
            kept = {a.key for a in self.state.registry if a.device == device.id}
            assert set(device.ledger.agents()) <= kept

    def restart_keeps_everything(self) -> None:
        late = self.bench.restart()
        late.tick()
        for device in DEVICES:
            assert late.worker(device, epoch=10**6, total_bytes=TOTAL).welcome is not None
        old = {a.key for a in self.state.registry}
        new = {AgentKey(a.principal, a.agent) for a in late.core.report(late.now_ns).agents}
        swept = late.core.report(late.now_ns).sweep
        idle = {AgentKey(a.principal, a.agent) for a in swept.last if a.reason == "idle"}
        assert new | idle == old
        kept = [x for x in self.state.leases.values() if not x.ephemeral]
        leases = [x for device in late.core.report(late.now_ns).devices for x in device.leases]
        assert {x.name for x in leases} == {x.key.name for x in kept}
        msgspec.msgpack.encode(late.core.report(late.now_ns))
        late.advance(limits.COME_BACK_MS + 1, step_ms=2000)
        stay = {a.key for a in self.state.registry if not a.spec.ephemeral and not a.spec.ttl_s}
        new = {AgentKey(a.principal, a.agent) for a in late.core.report(late.now_ns).agents}
        assert new == stay


WEIGHTS = {
    "decode": 10,
    "work": 14,
    "finish": 4,
    "follow_up": 4,
    "answer": 4,
    "answer_all": 2,
    "register": 3,
    "lease": 2,
    "fork": 3,
    "forget": 1,
    "history": 1,
    "time": 2,
    "residency": 2,
    "hold_answers": 1,
    "restart_worker": 1,
    "drain": 1,
    "leave_drained": 2,
    "say_ready_again": 1,
    "stale": 1,
    "leave": 1,
    "fall_behind": 1,
    "unregister": 1,
    "reset": 1,
    "cancel_register": 1,
    "fit": 2,
    "long_time": 1,
    "restart_broker": 1,
}
ACTIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


@settings(max_examples=120)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 2**40)), min_size=60, max_size=160)
)
def test_nothing_that_peers_do_breaks_a_promise(actions: list[tuple[str, int]]) -> None:
    machine = Machine()
    for name, number in actions:
        getattr(machine, name)(Choice(number))
        machine.check()
    machine.finish_everything()
    machine.restart_keeps_everything()
