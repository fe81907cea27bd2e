"""What a principal has parked stays within its quota of KV (*pure*).

Parked KV is a cache: a conversation that loses it loses nothing that was said, and its next job
computes the prompt again. So nobody is refused anything for it. The conversations that were unused
for longest go first, forks like all others; as much as its agents were guaranteed is always left.
"""

from __future__ import annotations

from vram_conductor.broker.permissions import held_bytes, quota_of
from vram_conductor.broker.registry import Conversation
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Forget
from vram_conductor.protocol.errors import ErrorInfo


def reported(state: State, commander: Commander, device: Device) -> None:
    """The worker of ``device`` has said what is parked."""
    if any(quota.kv_bytes is not None for quota in state.quotas.values()):
        for principal in sorted({key.principal for key in device.places}):
            check(state, commander, principal)


def check(state: State, commander: Commander, principal: str) -> None:
    """Keep a principal within its quota, as far as its idle conversations allow."""
    most = quota_of(state, principal).kv_bytes
    if most is None:
        return
    parked = _parked(state, principal)
    over = sum(size for _, _, size in parked)
    over -= max(most, held_bytes(state, principal)[1])
    for device, conversation, size in sorted(parked, key=lambda item: item[1].used_ns):
        if over <= 0:
            return
        if not conversation.busy:
            _give_up(commander, device, conversation)
            state.log("info", "kv_given_up", conversation=str(conversation.key), why="quota")
            over -= size


def _parked(state: State, principal: str) -> list[tuple[Device, Conversation, int]]:
    """What the principal's conversations have parked, in bytes. What is on its way out may still
    be in the worker's reports."""
    found: list[tuple[Device, Conversation, int]] = []
    for device in state.devices.values():
        for key, place in device.places.items():
            if key.principal != principal or not place.parked_bytes:
                continue
            conversation = state.registry.conversation(key)
            if conversation is not None and not conversation.going:
                found.append((device, conversation, place.parked_bytes))
    return found


def _give_up(commander: Commander, device: Device, conversation: Conversation) -> None:
    key, link = conversation.key, device.link
    assert link is not None, "places are forgotten with their worker"
    conversation.given_up = conversation.going = True
    device.places.pop(key, None)
    link.known.pop(key, None)

    def gone(message: ReplyMessage, raw: list[bytes]) -> bool:
        conversation.going = False
        return True

    def lost(error: ErrorInfo) -> None:
        conversation.going = False

    commander.send(
        device,
        lambda epoch, op: Forget(broker_epoch=epoch, op=op, conversation=key),
        on_reply=gone,
        on_lost=lost,
    )
