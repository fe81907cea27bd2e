"""What workers say about their device (*pure*): capacity at READY, then samples and places."""

from __future__ import annotations

import dataclasses

from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.claims import Measured, check_bytes
from vram_conductor.broker.ledger.decisions import Deny
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.commands import Ready, Residency
from vram_conductor.protocol.config import Config
from vram_conductor.protocol.errors import ConductorError, ErrorInfo
from vram_conductor.protocol.values import Line, Memory


def device_spec(config: Config, device: Device, ready: Ready) -> DeviceSpec:
    """The ledger's spec now that the worker has found the device.

    Raises:
        InvalidArgument: impossible numbers.
    """
    spec = DeviceSpec.of(device.config, ready.device, config.broker.sample_max_age_ms)
    arena_bytes = check_bytes("host_total_bytes", ready.host_total_bytes)
    if arena_bytes:
        spec = dataclasses.replace(spec, host_cap_bytes=min(spec.host_cap_bytes, arena_bytes))
    return spec


def check_numbers(config: Config, device: Device, ready: Ready) -> ErrorInfo | None:
    """What is impossible in READY; None if all is well."""
    try:
        device_spec(config, device, ready)
        check_bytes("base_bytes", ready.base_bytes)
        check_memory(ready.memory)
    except ConductorError as error:
        return error.info
    return None


def check_memory(memory: Memory) -> None:
    """Raises InvalidArgument ``bad_bytes``."""
    check_bytes("used_bytes", memory.used_bytes)
    check_bytes("own_bytes", memory.own_bytes)
    check_bytes("foreign_bytes", memory.foreign_bytes)
    check_bytes("age_ms", memory.age_ms)


def base_of(report: Residency) -> int | None:
    """What is to be promised for the worker's process itself; None: it does not say."""
    if report.base_bytes is not None:
        return report.base_bytes
    return next((line.bytes for line in report.lines if line.key == "base"), None)


class Samples:
    """Carries samples into the ledgers, and budgets back to the workers."""

    def __init__(self, state: State, commander: Commander) -> None:
        self._state = state
        self._commander = commander

    def welcomed(self, device: Device, ready: Ready) -> None:
        """A worker was welcomed: its numbers passed ``check_numbers``."""
        device.info = ready.device
        device.ledger.reconfigure(device_spec(self._state.config, device, ready))
        device.ledger.set_base(ready.base_bytes)
        for parked in ready.parked:
            if self._state.registry.conversation(parked.conversation) is not None:
                device.note_place(parked.conversation, "parked", parked.n_tokens, parked.bytes)
        self._observe(device, ready.memory)

    def report(self, device: Device, report: Residency) -> None:
        """A report of the device's present worker."""
        try:
            check_memory(report.memory)
        except ConductorError as error:
            self._state.log("error", "bad_residency", device=device.id, reason=error.reason)
            return
        device.residency = report
        device.places = {place.conversation: place for place in report.places}
        self._book_lines(device, report)
        is_fresh = self._observe(device, report.memory)
        self._book_base(device, report, is_fresh=is_fresh)
        # What is there may let jobs in that wait here.
        self._state.dispatch_due.add(device.id)

    def _observe(self, device: Device, memory: Memory) -> bool:
        """Take a sample; False if it is older than the one held, or too old to count."""
        now_ns = self._state.now_ns
        ledger = device.ledger
        before = ledger.budget_bytes
        was_stale = ledger.sample_is_stale(now_ns)
        is_newer = ledger.observe(memory.foreign_bytes, now_ns - memory.age_ms * MS)
        if is_newer:
            device.memory = memory
        if ledger.budget_bytes > before or was_stale:
            self._state.admission_due.add(device.id)
        self._commander.send_budget(device)
        return is_newer and not ledger.sample_is_stale(now_ns)

    def _book_base(self, device: Device, report: Residency, *, is_fresh: bool) -> None:
        """What the worker's process takes can change. More counts at once. Less counts only with
        a sample from after it: what was the base's before may be others' now."""
        ledger, base_bytes = device.ledger, base_of(report)
        if base_bytes is None or base_bytes == ledger.base_bytes:
            return
        if base_bytes < ledger.base_bytes and not is_fresh:
            return
        try:
            ledger.set_base(base_bytes)
        except ConductorError as error:
            self._state.log("error", "bad_residency", device=device.id, reason=error.reason)
            return
        self._state.admission_due.add(device.id)
        self._state.dispatch_due.add(device.id)

    def _book_lines(self, device: Device, report: Residency) -> None:
        """What was really allocated replaces the estimates."""
        for line in report.lines:
            try:
                deny = self._book(device, line)
            except ConductorError as error:
                self._state.log("error", "bad_residency", device=device.id, reason=error.reason)
                continue
            if deny is not None and device.surprises.get(line.key) != line.bytes:
                device.surprises[line.key] = line.bytes
                self._state.log(
                    "warning",
                    "measured_more",
                    device=device.id,
                    line=line.key,
                    short_by_bytes=deny.short_by_bytes,
                )

    def _book(self, device: Device, line: Line) -> Deny | None:
        """One line. A pool's size belongs to the shape it has now, which may be the one from
        before the last LOAD: without a shape it says nothing."""
        what, _, name = line.key.partition(":")
        ledger = device.ledger
        if line.unmeasured:
            return None
        if what == "weights":
            return ledger.measured(name, Measured(weights_bytes=line.bytes))
        if what == "scratch":
            return ledger.measured(name.rpartition("@")[0], Measured(scratch_bytes=line.bytes))
        if what == "pool" and line.shape is not None:
            model = name.rpartition("@")[0]
            return ledger.measured(model, Measured(pool_bytes=line.bytes), line.shape)
        return None
