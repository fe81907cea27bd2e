"""Draws a status report as text: the ledger as bars, its lines, agents, jobs. *Pure.*"""

from __future__ import annotations

from vram_conductor.client.board_agents import render_agents, render_sweep, who
from vram_conductor.client.text import bar, duration, plural, size, table, wrapped
from vram_conductor.protocol.status import (
    DeviceStatus,
    JobStatus,
    LeaseStatus,
    LedgerStatus,
    StatusReport,
)
from vram_conductor.protocol.values import Line

_MARKS = {"base": "b", "weights": "W", "pool": "P", "scratch": "s", "lease": "L"}
_OTHER = "?"
_KEPT = ("weights:", "pool:")
"""Lines of what may stay when its agents are gone."""
_LEGEND = {
    "b": "base",
    "W": "weights",
    "P": "pool",
    "s": "scratch",
    "L": "lease",
    _OTHER: "other",
    "f": "foreign",
    ".": "free",
}
_BAR_CHARS = (20, 72)
JOBS_SHOWN_MAX = 20


def render(report: StatusReport, width: int = 100) -> str:
    """The whole picture in at most ``width`` columns (80 or more)."""
    parts = [_head(report, width)]
    parts += [_device(device, width) for device in report.devices]
    parts.append(render_agents(report.agents, width))
    parts.append(_jobs(report, width))
    return "\n\n".join(part for part in parts if part)


def _head(report: StatusReport, width: int) -> str:
    facts = [
        f"broker {report.version or '?'}, "
        f"{'draining' if report.draining else 'serving'} for {duration(report.uptime_ms)}",
        _agents_total(report),
        plural(report.sessions, "session"),
        f"{plural(report.jobs_done, 'job')} done, {report.jobs_failed} failed",
    ]
    lines = [wrapped("; ".join(facts), width, hanging=2)]
    if report.journal_trouble:
        trouble = f"! agents and conversations are not saved now: {report.journal_trouble}"
        lines.append(wrapped(trouble, width, hanging=2))
    if (swept := render_sweep(report.sweep)) is not None:
        lines.append(wrapped(swept, width, hanging=2))
    if not report.devices:
        lines.append("no device: add a [[device]] section to the configuration")
    return "\n".join(lines)


def _agents_total(report: StatusReport) -> str:
    total, mine = report.agents_total, len(report.agents)
    return plural(total, "agent") + (f", {mine} of them yours" if mine != total else "")


def _device(device: DeviceStatus, width: int) -> str:
    name = f" ({device.name})" if device.name else ""
    lines = [wrapped(f"{device.device}{name}, {device.mode} mode", width, hanging=2)]
    lines.append(wrapped(_worker(device), width, 2, 2))
    lines += _bars(device, width)
    lines.append(_lines(device, width))
    lines += [wrapped(_lease(lease), width, 2, 2) for lease in device.leases]
    lines.append(wrapped(_memory(device), width, 2, 2))
    pinned_bytes = sum(x.bytes for x in device.parked if x.key.startswith("pinned:"))
    if device.lingered:
        text = f"weights left {plural(device.lingered, 'time')} because nobody used them"
        lines.append(wrapped(text, width, 2, 2))
    parked = size(sum(x.bytes for x in device.parked) - pinned_bytes)
    host = device.host
    spare = " (with room to write the next state beside the last)" if host.promised_bytes else ""
    if pinned_bytes:
        text = f"{size(pinned_bytes)} of weights backed up in pinned host memory, to wake from"
        lines.append(wrapped(text, width, 2, 2))
    lines.append(
        wrapped(
            f"parked KV {parked} in shared memory, {size(host.promised_bytes)} promised of "
            f"{size(host.cap_bytes)}{spare}; moved {plural(device.swaps, 'time')}",
            width,
            2,
            2,
        )
    )
    return "\n".join(lines)


def _worker(device: DeviceStatus) -> str:
    worker = device.worker
    if worker is None:
        last = f"the last one was {device.away}; " if device.away else ""
        jobs = f"jobs wait {duration(device.patience_ms)} more for the next one"
        note = f" ({last}{jobs})" if device.patience_ms else f" ({last}jobs are refused)"
        return f"! no worker for {duration(device.absent_ms)}{note}: agents wait, nothing is lost"
    if worker.away_ms is not None:
        wait = f"it is waited for {duration(worker.away_ms)} more"
        return f"! worker pid {worker.pid} on {worker.host} is cut off and works on; {wait}"
    state = "draining" if worker.draining else "busy" if worker.busy else "idle"
    note = f": {worker.mechanism_note}" if worker.mechanism_note else ""
    return f"worker pid {worker.pid} on {worker.host}, {state}; {worker.mechanism}{note}"


def _lease(lease: LeaseStatus) -> str:
    what = f"lease {lease.name}: {size(lease.bytes)}"
    if lease.left_ms is None:
        return f"{what}; agents are making room for it"
    whose = ", or with its session" if lease.ephemeral else ""
    return f"{what}, ends in {duration(lease.left_ms)} unless it is renewed{whose}"


def _memory(device: DeviceStatus) -> str:
    memory = device.memory
    if memory is None:
        return "! no memory sample yet: nothing is admitted until there is one"
    age = f", {duration(device.sample_age_ms)} ago" if device.sample_age_ms is not None else ""
    parts = [f"resident {size(device.resident_bytes)}", f"foreign {size(memory.foreign_bytes)}"]
    if device.unattributed_bytes:
        parts.append(f"unattributed {size(device.unattributed_bytes)}")
    text = f"used {size(memory.used_bytes)} = {' + '.join(parts)}{age}"
    if device.budget_bytes != device.promised.cap_bytes:
        text += f"; the worker may use {size(device.budget_bytes)}"
    return text


def _bars(device: DeviceStatus, width: int) -> list[str]:
    cap = max(device.promised.cap_bytes, 1)
    foreign = device.foreign_bytes
    promised = _shares(device.promised.lines, foreign)
    # The ledger promises one pool at a time, however many lines there are.
    promised = _at_most(promised, device.promised.promised_bytes + foreign)
    # Here a lease shows as what its holder uses of it.
    resident = _shares(device.resident, device.memory.foreign_bytes if device.memory else 0)
    texts = _share(device.promised, foreign), size(device.resident_bytes)
    inner = width - len("  promised [] ") - max(map(len, texts))
    inner = max(_BAR_CHARS[0], min(_BAR_CHARS[1], inner))
    drawn = bar(promised, cap, inner), bar(resident, cap, inner)
    marks = [mark for mark in _LEGEND if mark in drawn[0] + drawn[1]]
    return [
        f"  promised [{drawn[0]}] {texts[0]}",
        f"  resident [{drawn[1]}] {texts[1]}",
        "            " + "  ".join(f"{mark} {_LEGEND[mark]}" for mark in marks),
    ]


def _shares(lines: list[Line], foreign_bytes: int) -> list[tuple[str, int]]:
    sums: dict[str, int] = {}
    for line in lines:
        mark = _MARKS.get(line.key.partition(":")[0], _OTHER)
        sums[mark] = sums.get(mark, 0) + line.bytes
    order = ["b", "W", "P", "s", "L", _OTHER]
    return [(mark, sums[mark]) for mark in order if mark in sums] + [("f", foreign_bytes)]


def _at_most(parts: list[tuple[str, int]], total_bytes: int) -> list[tuple[str, int]]:
    """What takes turns is drawn once: pools first, then weights, give up what is over."""
    over = sum(value for _, value in parts) - total_bytes
    sizes = dict(parts)
    for mark in ("P", "W"):
        taken = min(max(0, over), sizes.get(mark, 0))
        over -= taken
        if taken:
            sizes[mark] -= taken
    return list(sizes.items())


def _share(ledger: LedgerStatus, foreign_bytes: int) -> str:
    taken = ledger.promised_bytes + foreign_bytes
    percent = 100 * taken / max(ledger.cap_bytes, 1)
    return f"{size(taken)} of {size(ledger.cap_bytes)} ({percent:.0f} %)"


def _lines(device: DeviceStatus, width: int) -> str:
    """Promised beside resident, key by key."""
    resident = {line.key: line for line in device.resident}
    rows: list[list[str]] = []
    for line in device.promised.lines:
        here = resident.pop(line.key, None)
        if not line.bytes and here is None:
            continue  # room that was kept for what the device turned out not to need
        mark = "~" if line.unmeasured else ""
        rows.append(
            [line.key, mark + size(line.bytes), size(here.bytes) if here else "-", line.detail]
        )
    # What is resident and was never promised: the base of a context, pools that happen to fit.
    rows += [
        [line.key, "-", size(line.bytes), line.detail] for line in resident.values() if line.bytes
    ]
    if not rows:
        return "  nothing is promised, nothing is resident"
    header = ["line", "promised", "resident", ""]
    drawn = table(header, rows, right=(1, 2), width=width - 2, squeeze=(3, 0))
    notes: list[str] = []
    if any(line.unmeasured for line in device.promised.lines):
        notes.append("~ is an estimate: made at first use")
    if sum(line.bytes for line in device.promised.lines) > device.promised.promised_bytes:
        who_turns = "pools" if device.mode == "reserve" else "models"
        notes.append(f"{who_turns} take turns: the largest counts")
    if device.leases and device.promised.promised_bytes > device.promised.cap_bytes:
        notes.append("a lease may take what agents were promised: they wait until it ends")
    if _has_leftovers(device):
        notes.append("what is resident beyond its promise is left over: it goes for whoever comes")
    lines = [f"  {line}" for line in drawn.splitlines()]
    if notes:
        lines.append(wrapped(f"({'; '.join(notes)})", width, 2, 1))
    return "\n".join(lines)


def _has_leftovers(device: DeviceStatus) -> bool:
    """Whether pools or weights are there that were promised to agents who are gone: a pool keeps
    its size until it is opened anew, weights linger."""
    promised = {line.key: line for line in device.promised.lines}
    for here in device.resident:
        line = promised.get(here.key)
        beyond = here.bytes > (line.bytes if line else 0)
        if here.key.startswith(_KEPT) and beyond and not (line and line.unmeasured):
            return True
    return False


def _jobs(report: StatusReport, width: int) -> str:
    head = f"queue: {report.queued} of {report.queued_max} waiting"
    if not report.jobs:
        return head
    header = ["job", "conversation", "state", "tokens", "age"]
    several = len({job.principal for job in report.jobs}) > 1
    rows = [_job(job, several) for job in report.jobs[:JOBS_SHOWN_MAX]]
    lines = [head, table(header, rows, right=(0, 3, 4), width=width, squeeze=(1, 2))]
    if len(report.jobs) > JOBS_SHOWN_MAX:
        lines.append(f"… and {len(report.jobs) - JOBS_SHOWN_MAX} more")
    return "\n".join(lines)


def _job(job: JobStatus, several: bool) -> list[str]:
    state = job.state + (f", attempt {job.attempt}" if job.attempt > 1 else "")
    if job.waiting:
        until = "" if job.waiting_ms is None else f", {duration(job.waiting_ms)} at most"
        state += f" (waits for {job.waiting}{until})"
    name = who(job.agent, job.conversation)
    if several:  # numbers count each principal's own
        name = f"{job.principal}: {name}"
    return [str(job.job), name, state, str(job.generated_tokens), duration(job.age_ms)]
