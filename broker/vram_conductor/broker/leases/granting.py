"""From asked to held (*pure*): the worker makes room, and a sample proves it; or all is undone.

The budget is smaller from the moment of the grant, so nothing new moves in. Held it is only when
the worker has confirmed that budget *and* a memory sample taken after that shows the room: a
program that was told OK allocates at once.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vram_conductor.broker.errors import bad_reply_error
from vram_conductor.broker.leases.tenure import Tenure
from vram_conductor.broker.ledger.refusal import human_bytes
from vram_conductor.broker.state import MS, State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Failed, WorkerOk
from vram_conductor.protocol.errors import Code, ErrorInfo
from vram_conductor.protocol.messages import Ok, Progress


class Granting:
    """Pending leases on their way.

    Args:
        held: called when the room is there, before the waiters are answered.
    """

    def __init__(self, state: State, commander: Commander, held: Callable[[Tenure], None]) -> None:
        self._state = state
        self._commander = commander
        self._held = held

    def begin(self, tenure: Tenure) -> None:
        """The ledger has taken the lease off the budget: tell the worker."""
        state, device = self._state, self._state.devices[tenure.device]
        wait_ms = state.config.broker.lease_wait_ms
        state.timers.set(("lease_wait", tenure.key), state.in_ms(wait_ms))
        self._progress(tenure, device)
        tenure.op = self._commander.send_budget(
            device,
            on_reply=lambda message, raw: self._confirmed(tenure, message),
            on_lost=lambda error: self.withdraw(tenure, error),
        )

    def sampled(self, device: Device) -> None:
        """The device's worker has sent a sample."""
        for tenure in self._pending(device):
            self._check(tenure, device)

    def lost(self, device: Device, error: ErrorInfo) -> None:
        """The device has lost its worker: nobody can say when there will be room."""
        for tenure in self._pending(device):
            self.withdraw(tenure, error)

    def expire(self, tenure: Tenure) -> None:
        """It took too long."""
        self.withdraw(tenure, self._timeout(tenure))

    def withdraw(self, tenure: Tenure, error: ErrorInfo) -> None:
        """Take a pending lease back; its waiters get ``error``."""
        state = self._state
        if state.leases.get(tenure.key) is not tenure or tenure.expires_ns is not None:
            return
        device = state.devices[tenure.device]
        self._commander.drop(device, tenure.op)
        state.timers.cancel(("lease_wait", tenure.key))
        state.forget_lease(tenure)
        device.ledger.release_lease(tenure.key)
        self._commander.send_budget(device)
        state.log("info", "lease_withdrawn", lease=str(tenure.key), reason=error.reason)
        for peer, rid in tenure.waiters:
            state.fail(peer, rid, error)

    # --- parts --------------------------------------------------------------------------------

    def _pending(self, device: Device) -> list[Tenure]:
        leases = self._state.leases.values()
        return [x for x in leases if x.device == device.id and x.expires_ns is None]

    def _confirmed(self, tenure: Tenure, message: ReplyMessage) -> bool:
        device = self._state.devices[tenure.device]
        match message:
            case WorkerOk():
                tenure.confirmed_ns = self._state.now_ns
            case Failed():
                self.withdraw(tenure, message.error)
            case _:
                self.withdraw(tenure, bad_reply_error(device.id, message))
        return True

    def _check(self, tenure: Tenure, device: Device) -> None:
        taken_ns, memory = device.ledger.sample_taken_ns, device.memory
        confirmed = tenure.confirmed_ns is not None and taken_ns is not None
        if not confirmed or memory is None:
            return
        assert taken_ns is not None
        assert tenure.confirmed_ns is not None
        if taken_ns < tenure.confirmed_ns or memory.own_bytes > device.ledger.room_bytes:
            self._progress(tenure, device)
            return
        state = self._state
        state.timers.cancel(("lease_wait", tenure.key))
        self._held(tenure)
        body = msgspec.to_builtins(tenure.status(state.now_ns))
        waiters, tenure.waiters = tenure.waiters, {}
        for peer, rid in waiters:
            state.to_client(peer, Ok(rid=rid, body=body))

    def _short_bytes(self, device: Device) -> int:
        """What the worker has above its budget, as the last sample shows it."""
        memory = device.memory
        return max(0, memory.own_bytes - device.ledger.room_bytes) if memory else 0

    def _progress(self, tenure: Tenure, device: Device) -> None:
        short = min(tenure.size_bytes, self._short_bytes(device))
        for peer, rid in tenure.waiters:
            self._state.to_client(
                peer,
                Progress(
                    rid=rid, stage="park", done=tenure.size_bytes - short, total=tenure.size_bytes
                ),
            )

    def _timeout(self, tenure: Tenure) -> ErrorInfo:
        device = self._state.devices[tenure.device]
        ledger, memory = device.ledger, device.memory
        own = memory.own_bytes if memory else 0
        short = self._short_bytes(device)
        waited_ms = (self._state.now_ns - tenure.since_ns) // MS
        why = (
            f"the worker still has {human_bytes(own)}, {human_bytes(short)} more than is left to it"
            if tenure.confirmed_ns is not None
            else "the worker is busy and has not confirmed its smaller budget"
        )
        return ErrorInfo(
            Code.DEADLINE_EXCEEDED,
            "lease_timeout",
            f"{human_bytes(tenure.size_bytes)} of {device.id} were not free within {waited_ms} ms: "
            f"{why}; nothing is held: try again, or ask for less",
            retryable=True,
            details={
                "device": device.id,
                "requested_bytes": tenure.size_bytes,
                "own_bytes": own,
                "budget_bytes": ledger.budget_bytes,
                "short_by_bytes": short,
                "foreign_bytes": ledger.foreign_bytes,
                "ledger_max_bytes": ledger.cap_bytes,
                "waited_ms": waited_ms,
                "confirmed": tenure.confirmed_ns is not None,
            },
        )
