"""Where a new broker starts from (*pure*): the configured devices and the folded journal."""

from __future__ import annotations

from vram_conductor.broker.agents.removal import Removal
from vram_conductor.broker.agents.sweep import used_ns_of
from vram_conductor.broker.errors import unconfigured_error
from vram_conductor.broker.journal.records import AgentRegistered
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.ledger.capacity import DeviceSpec
from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.registry import Agent, Conversation
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Ready
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.values import DeviceInfo, DeviceKind


def configure(state: State, restored: Restored) -> None:
    """Create the configured devices, without workers yet."""
    for config in state.config.device:
        _add_device(state, config, restored.worker_epochs.get(config.id, 0))


def find_device(state: State, ready: Ready) -> Device | None:
    """The device that a worker names. Where none is configured at all, and there are not too many,
    it may be a new one, which is not in the state yet: the worker may still be refused."""
    name = ready.device.device
    if not state.serves(name):
        return None
    if name not in state.devices and len(state.devices) < limits.DEVICES_MAX:
        return _new_device(state, DeviceConfig(id=name, kind=ready.device.kind), 0)
    return state.devices.get(name)


def restore(state: State, restored: Restored, removal: Removal) -> None:
    """Bring back the agents and their conversations. They wait for their device's worker, which
    is asked whether they still fit."""
    for record in restored.agents.values():
        agent = _agent(state, record, restored.used_unix_ns.get(record.agent))
        state.registry.add(agent)
        removal.restored(agent)
    for key, saved in restored.conversations.items():
        owner = state.registry.find(key.agent_key)
        if owner is not None:
            owner.conversations[key.conversation] = Conversation(
                key, saved.version, saved.transcript, turns=saved.turns
            )


def _agent(state: State, record: AgentRegistered, used_unix_ns: int | None) -> Agent:
    agent = Agent(
        key=record.agent,
        spec=record.spec,
        device=record.device,
        model=record.model,
        state="waiting",
        used_ns=used_ns_of(used_unix_ns, state.now_ns, state.unix_ns()),
    )
    name = record.device
    if name not in state.devices:
        _add_device(state, DeviceConfig(id=name, kind=_guess_kind(name)), 0)
    if not state.serves(name):
        agent.state, agent.reason = "suspended", unconfigured_error(name)
    return agent


def _add_device(state: State, config: DeviceConfig, epoch: int) -> None:
    device = _new_device(state, config, epoch)
    state.devices[config.id] = device
    state.timers.set(("absent", config.id), device.patient_until_ns)


def _new_device(state: State, config: DeviceConfig, epoch: int) -> Device:
    """The ledger gets its real size from the worker's READY."""
    info = DeviceInfo(device=config.id, kind=config.kind, name="", total_bytes=0)
    spec = DeviceSpec.of(config, info, state.config.broker.sample_max_age_ms)
    return Device(config=config, ledger=Ledger(spec), absent_ns=state.now_ns, epoch=epoch)


def _guess_kind(device: str) -> DeviceKind:
    return "cuda" if device.startswith("cuda") else "cpu"
