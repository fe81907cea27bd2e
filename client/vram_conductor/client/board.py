"""Draws a status report as text: the ledger as bars, its lines, agents, jobs. Pure."""

from __future__ import annotations

from vram_conductor.client.text import bar, duration, size, table
from vram_conductor.protocol.status import (
    AgentStatus,
    ConversationStatus,
    DeviceStatus,
    JobStatus,
    LedgerStatus,
    StatusReport,
)
from vram_conductor.protocol.values import Line

_MARKS = {"base": "b", "weights": "W", "pool": "P", "scratch": "s", "lease": "L"}
_LEGEND = "W weights  P pool  b base  s scratch  L lease  f foreign  . free"


def render(report: StatusReport, width: int = 100) -> str:
    """The whole picture in at most ``width`` columns (tables may be wider if names are)."""
    parts = [_head(report)]
    parts += [_device(device, width) for device in report.devices]
    parts.append(render_agents(report.agents))
    parts.append(_jobs(report))
    return "\n\n".join(part for part in parts if part)


def _head(report: StatusReport) -> str:
    state = "draining" if report.draining else "serving"
    agents = f"{report.agents_total} agent{'' if report.agents_total == 1 else 's'}"
    return (
        f"broker {report.version or '?'} {state} for {duration(report.uptime_ms)}, epoch "
        f"{report.broker_epoch}: {agents}, "
        f"{report.sessions} session{'' if report.sessions == 1 else 's'}, "
        f"{report.jobs_done} jobs done, {report.jobs_failed} failed"
    )


def _device(device: DeviceStatus, width: int) -> str:
    name = f" ({device.name})" if device.name else ""
    lines = [f"{device.device}{name}  {device.mode}  {_worker(device)}"]
    lines += _bars(device, width)
    lines.append(_lines(device))
    memory = device.memory
    if memory is not None:
        age = (
            ""
            if device.sample_age_ms is None
            else f", sampled {duration(device.sample_age_ms)} ago"
        )
        lines.append(
            f"  used {size(memory.used_bytes)} = resident {size(device.resident_bytes)} + foreign "
            f"{size(memory.foreign_bytes)} + unattributed {size(device.unattributed_bytes)}"
            f"{age}; budget of the worker {size(device.budget_bytes)}"
        )
    else:
        lines.append("  no memory sample yet: nothing is admitted until there is one")
    lines.append(
        f"  parked KV: {size(sum(line.bytes for line in device.parked))} in shared memory, "
        f"{_promise(device.host)}; {device.swaps} swaps"
    )
    return "\n".join(lines)


def _worker(device: DeviceStatus) -> str:
    worker = device.worker
    if worker is None:
        return f"no worker for {duration(device.absent_ms)}: agents wait, nothing is lost"
    note = f" ({worker.mechanism_note})" if worker.mechanism_note else ""
    state = "draining" if worker.draining else "busy" if worker.busy else "idle"
    return f"worker pid {worker.pid} on {worker.host} {state}, {worker.mechanism}{note}"


def _bars(device: DeviceStatus, width: int) -> list[str]:
    inner = max(20, min(72, width - 32))
    cap = max(device.promised.cap_bytes, 1)
    foreign = device.memory.foreign_bytes if device.memory else 0
    promised = _shares(device.promised.lines, foreign)
    resident = _shares(device.resident, foreign)
    return [
        f"  promised [{bar(promised, cap, inner)}] {_share(device.promised, foreign)}",
        f"  resident [{bar(resident, cap, inner)}] {size(device.resident_bytes)}",
        f"            {_LEGEND}",
    ]


def _shares(lines: list[Line], foreign_bytes: int) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for line in lines:
        mark = _MARKS.get(line.key.partition(":")[0], "?")
        sums[mark] = sums.get(mark, 0) + line.bytes
    order = ["b", "W", "P", "s", "L", "?"]
    return [(mark, sums[mark]) for mark in order if mark in sums] + [("f", foreign_bytes)]


def _share(ledger: LedgerStatus, foreign_bytes: int) -> str:
    taken = ledger.promised_bytes + foreign_bytes
    percent = 100 * taken / max(ledger.cap_bytes, 1)
    return f"{size(taken)} of {size(ledger.cap_bytes)} ({percent:.0f} %)"


def _promise(ledger: LedgerStatus) -> str:
    return f"{size(ledger.promised_bytes)} promised of {size(ledger.cap_bytes)}"


def _lines(device: DeviceStatus) -> str:
    """Promised beside resident, key by key."""
    resident = {line.key: line for line in device.resident}
    rows = []
    for line in device.promised.lines:
        here = resident.pop(line.key, None)
        rows.append(
            [
                f"  {line.key}",
                size(line.bytes) + (" est." if line.unmeasured else ""),
                size(here.bytes) if here else "-",
                line.detail,
            ]
        )
    # What is resident and was never promised: the base of a context, pools that happen to fit.
    rows += [
        [f"  {line.key}", "-", size(line.bytes), line.detail]
        for line in resident.values()
        if line.bytes
    ]
    if not rows:
        return "  no lines: nothing is promised"
    return table(["  line", "promised", "resident", ""], rows, right=(1, 2))


def render_agents(agents: list[AgentStatus]) -> str:
    """Agents and their conversations as a table."""
    if not agents:
        return "no agents; add one with: conductor register NAME --model MODEL"
    rows = []
    for agent in agents:
        shown = agent.conversations or [ConversationStatus(conversation="-", tokens=0, version=0)]
        for index, conversation in enumerate(shown):
            first = index == 0
            shared = f"shared with {len(agent.shared_with)}" if agent.shared_with else ""
            rows.append(
                [
                    agent.agent if first else "",
                    agent.model if first else "",
                    agent.device if first else "",
                    agent.state if first else "",
                    f"{agent.n_ctx} {agent.kv_type}" if first else "",
                    shared if first else "",
                    conversation.conversation,
                    str(conversation.tokens),
                    _where(conversation),
                ]
            )
        if agent.reason is not None:
            rows.append(["", f"! {agent.reason.message}", "", "", "", "", "", "", ""])
    header = [
        "agent",
        "model",
        "device",
        "state",
        "n_ctx",
        "weights",
        "conversation",
        "tokens",
        "KV",
    ]
    return table(header, rows, right=(7,))


def _where(conversation: ConversationStatus) -> str:
    parked = f" ({size(conversation.parked_bytes)} parked)" if conversation.parked_bytes else ""
    if conversation.where == "absent":
        return "-" if conversation.tokens == 0 else "absent (re-prefill)"
    return f"{conversation.where}{parked}"


def _jobs(report: StatusReport) -> str:
    head = f"queue: {report.queued} of {report.queued_max} waiting"
    if not report.jobs:
        return head
    return (
        head
        + "\n"
        + table(
            ["  job", "agent", "conversation", "state", "tokens", "age"],
            [_job(job) for job in report.jobs],
            right=(4, 5),
        )
    )


def _job(job: JobStatus) -> list[str]:
    state = job.state + (f" (attempt {job.attempt})" if job.attempt > 1 else "")
    cells = [f"  {job.job}", job.agent, job.conversation, state]
    return [*cells, str(job.generated_tokens), duration(job.age_ms)]
