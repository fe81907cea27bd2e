"""What clients ask about agents (*pure*): REGISTER, UNREGISTER, RESET, LIST."""

from __future__ import annotations

import msgspec

from vram_conductor.broker import admission, refusal
from vram_conductor.broker.records import AgentRegistered
from vram_conductor.broker.registration import Registration
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.reload import Reload
from vram_conductor.broker.removal import Removal, gone_error
from vram_conductor.broker.report import agent_list, agent_status
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.spec import check_same, spec_of
from vram_conductor.broker.state import State
from vram_conductor.broker.worker_errors import no_worker_error
from vram_conductor.protocol.errors import (
    Code,
    ErrorInfo,
    NotFound,
    Unavailable,
    error_from_info,
)
from vram_conductor.protocol.messages import List, Ok, Register, Reset, Unregister
from vram_conductor.protocol.status import AgentList
from vram_conductor.protocol.values import AgentKey


class AgentDesk:
    """Answers for agents. Every method raises a ConductorError with nothing changed, or sees to
    it that OK or ERROR follows for the message's rid."""

    def __init__(self, state: State, reload: Reload, removal: Removal) -> None:
        self._state = state
        self._reload = reload
        self._removal = removal
        self.registration: Registration | None = None

    def register(self, session: Session, message: Register) -> None:
        """Admit an agent; the same request again gets the same answer."""
        registration = self._registrations()
        key = AgentKey(session.principal, message.agent)
        spec = spec_of(message, self._state.config.broker, bare_path=session.same_user_ipc)
        agent, pending = self._state.registry.find(key), registration.find(key)
        if agent is not None:
            check_same(key, agent.spec, spec)
            self._again(session, message.rid, agent)
        elif pending is not None:
            check_same(key, pending.spec, spec)
            registration.join(pending, session.peer, message.rid)
        else:
            self._check_room(session.principal)
            devices = self._devices(spec.device)
            registration.start(key, spec, devices, session.peer, message.rid)

    def unregister(self, session: Session, message: Unregister) -> None:
        """Remove an agent, registered or about to be."""
        state = self._state
        key = AgentKey(session.principal, message.agent)
        pending = self._registrations().find(key)
        if pending is not None:
            error = ErrorInfo(
                Code.CANCELLED, "agent_removed", f"agent {key.agent!r} was unregistered meanwhile"
            )
            self._registrations().abort(pending, error)
            state.to_client(session.peer, Ok(rid=message.rid))
            return
        agent = state.registry.get(key)
        self._removal.remove(
            agent,
            gone_error(agent, "as asked"),
            lambda: state.to_client(session.peer, Ok(rid=message.rid)),
        )

    def reset(self, session: Session, message: Reset) -> None:
        """Forget a conversation."""
        key = AgentKey(session.principal, message.agent)
        version = self._removal.reset(key, message.conversation)
        self._state.to_client(session.peer, Ok(rid=message.rid, body={"version": version}))

    def list_agents(self, session: Session, message: List) -> None:
        """The principal's agents."""
        agents = list(self._state.registry.of(session.principal))
        body = AgentList(agents=agent_list(self._state, agents))
        self._state.to_client(session.peer, Ok(rid=message.rid, body=msgspec.to_builtins(body)))

    def admitted(self, agent: Agent, waiters: list[tuple[bytes, bytes]]) -> None:
        """A registration has succeeded: from now on the agent exists."""
        state = self._state
        state.registry.add(agent)
        if agent.spec.ephemeral:
            for peer, _ in waiters:
                self._own(agent, peer)
        else:
            state.append(
                AgentRegistered(
                    agent=agent.key, spec=agent.spec, device=agent.device, model=agent.model
                )
            )
        self._removal.watch_idle(agent)
        state.log("info", "agent_registered", agent=str(agent.key), device=agent.device)
        for peer, rid in waiters:
            self._ok(peer, rid, agent)

    # --- parts --------------------------------------------------------------------------------

    def _registrations(self) -> Registration:
        assert self.registration is not None
        return self.registration

    def _again(self, session: Session, rid: bytes, agent: Agent) -> None:
        """REGISTER of an agent that exists. If it is suspended, it is tried once more."""
        agent.used_ns = self._state.now_ns
        if agent.spec.ephemeral:
            self._own(agent, session.peer)
        if agent.state == "suspended":
            device = self._state.devices[agent.device]
            if device.link is None:
                raise error_from_info(no_worker_error(device.id))
            self._reload.begin(
                agent, lambda back, error: self._returned(session.peer, rid, back, error)
            )
        else:
            self._ok(session.peer, rid, agent)

    def _returned(self, peer: bytes, rid: bytes, agent: Agent, error: ErrorInfo | None) -> None:
        if error is None:
            self._ok(peer, rid, agent)
        else:
            self._state.fail(peer, rid, error)

    def _own(self, agent: Agent, peer: bytes) -> None:
        """An ephemeral agent lives as long as the last session that registered it."""
        session = self._state.sessions.find(peer)
        if session is not None:
            agent.owners.add(peer)
            session.ephemeral.add(agent.key)

    def _ok(self, peer: bytes, rid: bytes, agent: Agent) -> None:
        body = msgspec.to_builtins(agent_status(self._state, agent))
        self._state.to_client(peer, Ok(rid=rid, body=body))

    def _check_room(self, principal: str) -> None:
        state = self._state
        if state.draining:
            raise Unavailable(
                "draining", "the broker is shutting down; try again later", retryable=True
            )
        pending = [item.key.principal for item in self._registrations()]
        deny = admission.check_agents(
            len(state.registry) + len(pending),
            state.registry.count(principal) + pending.count(principal),
        )
        if deny is not None:
            raise error_from_info(refusal.error(deny))

    def _devices(self, wanted: str | None) -> tuple[str, ...]:
        """Where to ask: the wanted device, or every one that has a worker."""
        devices = self._state.devices
        if wanted is not None and wanted not in devices:
            raise NotFound(
                "no_such_device",
                f"there is no device {wanted!r}; known: {', '.join(sorted(devices)) or 'none'}",
                device=wanted,
                devices=sorted(devices),
            )
        names = [wanted] if wanted is not None else sorted(devices)
        ready = tuple(name for name in names if devices[name].ready)
        if not ready:
            raise error_from_info(no_worker_error(", ".join(names)))
        return ready
