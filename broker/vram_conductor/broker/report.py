"""The broker's state as STATUS shows it (*pure*)."""

from __future__ import annotations

from vram_conductor.broker.jobs.hindrance import hindrance
from vram_conductor.broker.jobs.job import Job
from vram_conductor.broker.ledger.tenants import own_lines, own_names
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import WorkerLink
from vram_conductor.protocol.status import (
    AgentStatus,
    ConversationStatus,
    DeviceStatus,
    JobStatus,
    LeaseStatus,
    LedgerStatus,
    StatusReport,
    WorkerStatus,
)

SHARED_MAX = 16
"""Names in ``shared_with``; the rest is counted."""


def status_report(state: State, principal: str | None) -> StatusReport:
    """The whole picture, with the agents and jobs of one principal or (None) of all."""
    agents = state.registry if principal is None else state.registry.of(principal)
    live = [job for job in state.jobs.live() if principal in (None, job.principal)]
    live.sort(key=lambda job: (job.state == "queued", job.job))
    return StatusReport(
        broker_epoch=state.broker_epoch,
        version=state.version,
        uptime_ms=(state.now_ns - state.started_ns) // MS,
        draining=state.draining,
        journal_trouble=state.journal_trouble,
        sessions=len(state.sessions),
        devices=[_device(state, device, principal) for device in state.devices.values()],
        agents=agent_list(state, list(agents)),
        agents_total=len(state.registry),
        queued=len(state.queue),
        queued_max=state.queue.jobs_max,
        jobs=[_job(state, job, principal) for job in live],
        jobs_done=state.jobs.done,
        jobs_failed=state.jobs.failed,
        sweep=state.sweeps.status(state.now_ns, principal),
    )


def agent_list(state: State, agents: list[Agent]) -> list[AgentStatus]:
    """Several agents; one pass over all jobs and all agents."""
    running: dict[object, int] = {}
    for job in state.jobs.live():
        if job.state != "queued":
            running[job.key.agent_key] = running.get(job.key.agent_key, 0) + 1
    sharing: dict[tuple[str, str], list[str]] = {}
    for agent in state.registry:
        sharing.setdefault((agent.device, agent.model.model), []).append(str(agent.key))
    return [
        _agent(state, agent, sharing[agent.device, agent.model.model], running.get(agent.key, 0))
        for agent in agents
    ]


def agent_status(state: State, agent: Agent) -> AgentStatus:
    """One agent."""
    return agent_list(state, [agent])[0]


def _agent(state: State, agent: Agent, sharing: list[str], running: int) -> AgentStatus:
    device = state.devices[agent.device]
    ledger = device.ledger
    claim = ledger.claim_of(agent.key)
    pool = ledger.pool(claim.model, claim.kv_type) if claim is not None else None
    name = str(agent.key)
    return AgentStatus(
        principal=agent.key.principal,
        agent=agent.key.agent,
        model=agent.spec.model,
        model_id=agent.model.model,
        device=agent.device,
        state=agent.state,
        n_ctx=agent.spec.n_ctx,
        kv_type=agent.spec.kv_type,
        slots=agent.spec.slots,
        priority=agent.spec.priority,
        weights_bytes=(ledger.weights_bytes(claim.model) or 0) if claim is not None else 0,
        pool_bytes=pool.bytes if pool is not None else 0,
        state_bytes=claim.state_bytes if claim is not None else 0,
        unmeasured=ledger.is_unmeasured(agent.key) if claim is not None else False,
        shared_with=_shared_with(name, sharing, agent.key.principal),
        rollback=agent.model.rollback,
        ephemeral=agent.spec.ephemeral,
        ttl_s=agent.spec.ttl_s,
        linger_s=agent.spec.linger_s,
        idle_ms=0 if agent.busy else (state.now_ns - agent.used_ns) // MS,
        reason=agent.reason,
        conversations=_conversations(agent, device),
        queued=state.queue.count(agent.key),
        running=running,
    )


def _shared_with(name: str, sharing: list[str], principal: str) -> list[str]:
    """Everybody's names for everybody would grow with the square of the agents."""
    shown = [other for other in sharing[: SHARED_MAX + 1] if other != name][:SHARED_MAX]
    return own_names(shown, principal, more=len(sharing) - 1 - len(shown))


def _conversations(agent: Agent, device: Device) -> list[ConversationStatus]:
    out: list[ConversationStatus] = []
    for name, conversation in agent.conversations.items():
        place = device.places.get(conversation.key)
        out.append(
            ConversationStatus(
                conversation=name,
                tokens=conversation.tokens,
                version=conversation.version,
                where=place.where if place else "absent",
                kv_tokens=place.n_tokens if place else 0,
                parked_bytes=place.parked_bytes if place else 0,
            )
        )
    return out


def _device(state: State, device: Device, principal: str | None) -> DeviceStatus:
    totals = device.ledger.totals()
    report = device.residency
    resident = list(report.lines) if report else []
    resident_bytes = sum(line.bytes for line in resident)
    memory = device.memory
    unattributed = 0
    if memory is not None and report is not None:
        unattributed = memory.used_bytes - resident_bytes - memory.foreign_bytes
    link = device.link
    return DeviceStatus(
        device=device.id,
        kind=device.config.kind,
        name=device.info.name if device.info else "",
        mode=device.config.mode,
        promised=LedgerStatus(
            cap_bytes=totals.cap_bytes,
            promised_bytes=totals.promised_bytes,
            lines=own_lines(device.ledger.lines(), principal),
        ),
        host=LedgerStatus(
            cap_bytes=totals.host_cap_bytes,
            promised_bytes=totals.host_promised_bytes,
            lines=own_lines(device.ledger.host_lines(), principal),
        ),
        resident=resident,
        resident_bytes=resident_bytes,
        parked=own_lines(report.host_lines, principal) if report else [],
        memory=memory,
        sample_age_ms=device.ledger.sample_age_ms(state.now_ns),
        unattributed_bytes=unattributed,
        foreign_bytes=totals.foreign_bytes,
        budget_bytes=totals.budget_bytes,
        leases=_leases(state, device, principal),
        worker=_worker(state, link) if link else None,
        absent_ms=0 if link else (state.now_ns - device.absent_ns) // MS,
        away="" if link else device.away,
        patience_ms=0 if link else max(0, device.patient_until_ns - state.now_ns) // MS,
        swaps=report.swaps if report else 0,
        rates=report.rates if report else {},
        lingered=report.lingered if report else 0,
    )


def _leases(state: State, device: Device, principal: str | None) -> list[LeaseStatus]:
    """The principal's (None: everybody's), in the order of their ends."""
    keys = [lease.key for lease in device.ledger.leases()]
    return [
        state.leases[key].status(state.now_ns)
        for key in keys
        if key in state.leases and principal in (None, key.principal)
    ]


def _worker(state: State, link: WorkerLink) -> WorkerStatus:
    ready, until_ns = link.ready, link.away_until_ns
    return WorkerStatus(
        worker=ready.worker,
        worker_epoch=ready.worker_epoch,
        pid=ready.pid,
        host=ready.host,
        version=ready.version,
        build=ready.build,
        mechanism=ready.mechanism,
        mechanism_note=ready.mechanism_note,
        steps=link.steps,
        busy=link.busy,
        silent_ms=link.liveness.silent_ms(state.now_ns),
        in_flight=len(link.runs),
        draining=link.draining,
        away_ms=None if until_ns is None else max(0, until_ns - state.now_ns) // MS,
    )


def _job(state: State, job: Job, principal: str | None) -> JobStatus:
    assert job.state != "ended"
    waiting, until_ns = hindrance(state, job, principal)
    return JobStatus(
        job=job.number,
        principal=job.principal,
        agent=job.key.agent,
        conversation=job.key.conversation,
        device=job.device,
        state=job.state,
        attempt=job.lost + 1,
        age_ms=(state.now_ns - job.received_ns) // MS,
        generated_tokens=job.attempt.generated_tokens if job.attempt else 0,
        priority=job.priority,
        waiting=waiting,
        waiting_ms=None if until_ns is None else max(0, until_ns - state.now_ns) // MS,
    )
