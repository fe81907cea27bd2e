"""Commands to workers and the fence around their replies (*pure*).

A reply counts only if it echoes this broker's epoch, comes from the device's present worker with
its epoch, and names a command that is still open. Everything else is from another life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vram_conductor.broker.errors import LEAVING, left_error
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import OnLost, OnReply, OpenOp, ReplyMessage, WorkerLink
from vram_conductor.protocol.commands import Budget, CancelRun, Failed, ToWorker
from vram_conductor.protocol.errors import Code, ErrorInfo

Build = Callable[[int, int], ToWorker]
"""(broker_epoch, op) → the command."""


class Commander:
    """Numbers commands, remembers who waits for the answer, and drops stale replies."""

    def __init__(self, state: State) -> None:
        self._state = state

    def send(
        self,
        device: Device,
        build: Build,
        *,
        on_reply: OnReply | None = None,
        on_lost: OnLost | None = None,
        timeout_ms: int | None = None,
        raw: Sequence[bytes] = (),
    ) -> int:
        """Send a command to the device's worker, which must exist; returns its ``op``.

        ``on_lost`` is called once if the worker is lost, or after ``timeout_ms`` without the
        final reply; then no reply to it is accepted any more.
        """
        link = device.link
        assert link is not None
        op = self._state.next_op()
        command = build(self._state.broker_epoch, op)
        link.ops[op] = OpenOp(
            type(command).__name__, on_reply or self._ignore, on_lost or (lambda error: None)
        )
        if timeout_ms is not None:
            self._state.timers.set(("op", (device.id, op)), self._state.in_ms(timeout_ms))
        self._post(link, op, command, raw)
        return op

    def drop(self, device: Device, op: int) -> None:
        """Nobody waits for ``op`` any more; its replies are stale from now on. Idempotent."""
        if device.link is not None:
            device.link.ops.pop(op, None)
        self._state.timers.cancel(("op", (device.id, op)))

    def cancel_run(self, device: Device, op: int) -> None:
        """Ask the worker to stop an attempt. It answers as the attempt, not to this."""
        if device.link is not None:
            own_op = self._state.next_op()
            command = CancelRun(broker_epoch=self._state.broker_epoch, op=own_op, run_op=op)
            self._post(device.link, own_op, command)

    def reply(self, device: Device, message: ReplyMessage, raw: list[bytes]) -> None:
        """Hand a reply to whoever waits for it; drop it if it is from another life."""
        link = device.link
        assert link is not None
        open_op = link.ops.get(message.op)
        if (
            open_op is None
            or message.broker_epoch != self._state.broker_epoch
            or message.worker_epoch != link.epoch
        ):
            self._state.log("debug", "stale_reply", device=device.id, op=message.op)
            return
        if isinstance(message, Failed) and message.error.reason == LEAVING:
            # The next worker will do it: for this one it is as if it had left already.
            link.draining = True
            self.drop(device, message.op)
            open_op.on_lost(left_error(device.id))
        elif open_op.on_reply(message, raw):
            self.drop(device, message.op)

    def expire(self, device: Device, op: int) -> None:
        """The timer of ``op`` has run out."""
        open_op = device.link.ops.get(op) if device.link else None
        if open_op is None:
            return
        self.drop(device, op)
        self._state.log("warning", "worker_timeout", device=device.id, command=open_op.what)
        open_op.on_lost(
            ErrorInfo(
                Code.DEADLINE_EXCEEDED,
                "worker_timeout",
                f"the worker of {device.id} did not answer {open_op.what.upper()} in time; "
                "see its log, then try again",
                retryable=True,
                details={"device": device.id},
            )
        )

    def lose(self, device: Device, link: WorkerLink, error: ErrorInfo) -> None:
        """Void all open commands of a lost worker, oldest first."""
        ops, link.ops = link.ops, {}
        for op, open_op in ops.items():
            self._state.timers.cancel(("op", (device.id, op)))
            open_op.on_lost(error)

    def send_budget(
        self, device: Device, on_reply: OnReply | None = None, on_lost: OnLost | None = None
    ) -> int:
        """Tell the worker its budget if it has changed, or if somebody waits for the answer;
        returns the op, 0 if nothing was sent."""
        link = device.link
        if link is None or link.draining:
            return 0
        budget_bytes = device.ledger.budget_bytes
        if budget_bytes == link.budget_bytes and on_reply is None:
            return 0
        link.budget_bytes = budget_bytes
        return self.send(
            device,
            lambda epoch, op: Budget(broker_epoch=epoch, op=op, budget_bytes=budget_bytes),
            on_reply=on_reply,
            on_lost=on_lost,
        )

    def _post(
        self, link: WorkerLink, op: int, command: ToWorker, raw: Sequence[bytes] = ()
    ) -> None:
        """Send now, or when the worker is back."""
        if link.resume_ms:
            link.unconfirmed.sent(op, (command, list(raw)))
        if link.connected:
            self._state.to_worker(link.peer, command, raw)

    def _ignore(self, message: ReplyMessage, raw: list[bytes]) -> bool:
        if isinstance(message, Failed):
            self._state.log("warning", "command_failed", op=message.op, reason=message.error.reason)
        return True
