"""Attempts that are stopped before they begin (*pure*): a worker that loads may not look at
CANCEL_RUN for as long as that takes, and nobody is kept waiting for it."""

from __future__ import annotations

from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import OpenOp, ReplyMessage
from vram_conductor.protocol.commands import Failed, RunDone
from vram_conductor.protocol.values import ConversationKey

WHAT = "stopped Run"


def let_go(state: State, device: Device, key: ConversationKey, op: int, wait_ms: int) -> None:
    """The job of RUN ``op`` has ended. Its conversation is free when the worker has answered, or
    is lost, or has not done so for ``wait_ms``; what it says is of no interest."""
    link = device.link
    assert link is not None

    def over() -> None:
        link.stopped.discard(key)
        state.dispatch_due.add(device.id)

    def reply(message: ReplyMessage, raw: list[bytes]) -> bool:
        if not isinstance(message, RunDone | Failed):
            return False
        over()
        return True

    link.stopped.add(key)
    link.ops[op] = OpenOp(WHAT, reply, lambda error: over())
    state.timers.set(("op", (device.id, op)), state.in_ms(wait_ms))
