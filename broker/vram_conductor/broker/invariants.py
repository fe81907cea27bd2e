"""What must hold after every event (*pure*): checked by tests, not in production."""

from __future__ import annotations

from collections import Counter

from vram_conductor.broker.agents.agent_desk import AgentDesk
from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.jobs import unbegun
from vram_conductor.broker.jobs.dispatch import SENT_MAX
from vram_conductor.broker.jobs.job import Job
from vram_conductor.broker.state import State
from vram_conductor.protocol.messages import Done, Error
from vram_conductor.protocol.values import AgentKey


def validate(state: State, agents: AgentDesk, reload: Reload) -> None:
    """Raises AssertionError where the parts of the state disagree."""
    _validate_ledgers(state, agents, reload)
    _validate_lobby(state, agents)
    _validate_queue(state)
    _validate_links(state)
    _validate_sessions(state)
    _validate_leases(state)
    for job in state.jobs:
        _validate_job(state, job)
    assert not state.dispatch_due
    assert not state.admission_due


def _validate_ledgers(state: State, agents: AgentDesk, reload: Reload) -> None:
    """Everybody in a ledger is registered there, or about to be; nobody is in two."""
    pending = {item.key: item for item in agents.registration}
    held: Counter[AgentKey] = Counter()
    for device in state.devices.values():
        device.ledger.validate_state()
        for key in device.ledger.agents():
            held[key] += 1
            agent = state.registry.find(key)
            if agent is None:
                reservation = pending[key].reservation
                assert reservation is not None
                assert reservation.device == device.id
            else:
                assert agent.device == device.id
                assert agent.state != "suspended"
    assert all(count == 1 for count in held.values())
    assert all(state.registry.find(key) for key in reload)
    for agent in state.registry:
        assert agent.key not in pending
        assert (agent.state == "loading") == (agent.key in reload)
        assert (agent.state == "suspended") == (agent.reason is not None)
        device = state.devices[agent.device]
        if agent.state == "ready":
            assert agent.key in held
            assert device.link is not None
        if agent.state == "waiting":
            assert not device.ready


def _validate_lobby(state: State, agents: AgentDesk) -> None:
    """Nobody waits for a worker who need not."""
    for guest in agents.lobby:
        assert ("guest", (guest.peer, guest.message.rid)) in state.timers
        assert state.sessions.find(guest.peer) is not None
        assert not state.draining
        for device in state.devices.values():
            assert not device.ready or (guest.devices and device.id not in guest.devices)


def _validate_queue(state: State) -> None:
    queued = list(state.queue)
    assert len(queued) == len(state.queue)
    assert {job.job for job in queued} == {job.job for job in state.jobs if job.state == "queued"}
    waiting = Counter(job.key for job in queued)
    per_agent = Counter(job.key.agent_key for job in queued)
    for agent in state.registry:
        assert state.queue.count(agent.key) == per_agent[agent.key]
        for conversation in agent.conversations.values():
            assert conversation.queued == waiting[conversation.key]
            if conversation.running is not None:
                job = state.jobs.find(conversation.running)
                assert job is not None
                assert job.state in ("sent", "running")
                assert job.key == conversation.key


def _validate_links(state: State) -> None:
    for device in state.devices.values():
        link = device.link
        under_way = {
            job.job
            for job in state.jobs
            if job.device == device.id and job.state in ("sent", "running")
        }
        assert under_way == (link.runs if link is not None else set())
        if link is None:
            continue
        most = SENT_MAX * state.config.broker.worker_inflight
        assert len(link.runs) + len(link.stopped) <= most
        for key, version in link.known.items():
            conversation = state.registry.conversation(key)
            assert conversation is not None
            assert conversation.version == version
        runs = {op for op, open_op in link.ops.items() if open_op.what == "Run"}
        assert len(runs) == len(link.runs)
        stopped = {op for op, open_op in link.ops.items() if open_op.what == unbegun.WHAT}
        assert len(stopped) == len(link.stopped)
        assert all(("op", (device.id, op)) in state.timers for op in stopped)


def _validate_sessions(state: State) -> None:
    for session in state.sessions:
        for number in session.jobs:
            job = state.jobs.find(number)
            assert job is not None
            assert job.peer == session.peer
        assert all(key in state.leases for key in session.leases)
        for key in session.ephemeral:
            agent = state.registry.find(key)
            assert agent is not None
            assert session.peer in agent.owners
    for agent in state.registry:
        if agent.spec.ephemeral:
            assert agent.owners or ("grace", agent.key) in state.timers
        assert (agent.spec.ttl_s is not None) == (("ttl", agent.key) in state.timers)


def _validate_leases(state: State) -> None:
    """The ledgers, the timers and the table agree; who is pending has somebody to answer."""
    held = {lease.key: lease for d in state.devices.values() for lease in d.ledger.leases()}
    # The ledger drops what has expired as soon as it looks, the table with the timer.
    late = {key for key, x in state.leases.items() if x.is_over(state.now_ns)}
    assert set(state.leases) - late <= set(held) <= set(state.leases)
    for key, tenure in state.leases.items():
        pending = tenure.expires_ns is None
        assert bool(tenure.waiters) == pending
        assert (("lease" if not pending else "lease_wait"), key) in state.timers
        if key in held:
            assert (held[key].bytes, held[key].expires_ns) == (tenure.size_bytes, tenure.expires_ns)
        if pending:
            assert state.devices[tenure.device].link is not None
        assert bool(tenure.owners) == tenure.ephemeral
        for peer in tenure.owners:
            session = state.sessions.find(peer)
            assert session is not None
            assert key in session.leases


def _validate_job(state: State, job: Job) -> None:
    assert (job.state == "ended") == isinstance(job.terminal, Done | Error)
    assert job.stream.finished == (job.state == "ended")
    assert (job.attempt is not None) == (job.state in ("sent", "running"))
    if job.peer is not None:
        session = state.sessions.find(job.peer)
        assert session is not None
        assert job.job in session.jobs
        if job.stream.sendable and not session.behind:
            assert ("pump", None) in state.timers
    conversation = state.registry.conversation(job.key)
    if job.state == "ended":
        assert ("result", job.job) in state.timers
        for what in ("queue", "deadline", "orphan", "stop"):
            assert (what, job.job) not in state.timers
    else:
        assert conversation is not None
        assert (conversation.running == job.job) == (job.state != "queued")
        link = state.devices[job.device].link
        if job.attempt is not None:
            assert link is not None
            assert job.attempt.op in link.ops
