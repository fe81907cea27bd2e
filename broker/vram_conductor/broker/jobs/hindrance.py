"""What a job waits for beside its turn (*pure*): a lease, others' use of the device, a worker, its
client."""

from __future__ import annotations

from vram_conductor.broker.jobs.job import Job
from vram_conductor.broker.ledger.decisions import Lease
from vram_conductor.broker.ledger.obstacles import obstacle
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.values import AgentKey


def shut_out(device: Device, agent: AgentKey) -> Lease | str:
    """What keeps the agent's pool off the device, even if it were alone there; empty: nothing.
    A pool that is there anyway (smaller than it may become) is not shut out."""
    what = obstacle(device.ledger, agent)
    claim = device.ledger.claim_of(agent)
    if what and claim is not None and device.residency is not None:
        key = f"pool:{claim.pool}"
        if any(line.key == key and line.bytes for line in device.residency.lines):
            return ""
    return what


def hindrance(state: State, job: Job, principal: str | None) -> tuple[str, int | None]:
    """Why the job cannot run now, as ``principal`` is told it, and when that ends by itself."""
    device = state.devices[job.device]
    if device.link is None or (device.link.draining and job.state == "queued"):
        return "worker", None
    if device.link.away_ns is not None:
        return "worker", device.link.away_until_ns
    if job.peer is None and not job.detach and job.state == "queued":
        return "client", None
    what = shut_out(device, job.key.agent_key)
    if isinstance(what, str):
        return what, None
    told = principal in (None, what.key.principal)
    return f"lease:{what.key if told else 'others'}", what.expires_ns
