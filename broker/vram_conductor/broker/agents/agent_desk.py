"""What clients ask about agents (*pure*): REGISTER, UNREGISTER, LIST."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vram_conductor.broker.agents.asking import Asking
from vram_conductor.broker.agents.estimates import Estimates
from vram_conductor.broker.agents.fit_desk import FitDesk
from vram_conductor.broker.agents.fitting import Fitting
from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.lobby import Guest, Lobby, Who
from vram_conductor.broker.agents.registration import Registration
from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.agents.removal import Removal
from vram_conductor.broker.agents.spec import check_same, spec_of
from vram_conductor.broker.errors import (
    cancelled_error,
    draining_error,
    gone_error,
    unconfigured_error,
)
from vram_conductor.broker.journal.records import AgentRegistered
from vram_conductor.broker.ledger import admission, refusal
from vram_conductor.broker.permissions import check_quota, quota_of
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.report import agent_list, agent_status
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.errors import (
    Code,
    ConductorError,
    ErrorInfo,
    NotFound,
    error_from_info,
)
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.messages import List, Ok, Register, Unregister
from vram_conductor.protocol.status import AgentList
from vram_conductor.protocol.values import AgentKey


class AgentDesk:
    """Answers for agents. Every method raises a ConductorError with nothing changed, or sees to
    it that OK or ERROR follows for the message's rid."""

    def __init__(
        self,
        state: State,
        commander: Commander,
        asking: Asking,
        estimates: Estimates,
        loading: Loading,
        reload: Reload,
        removal: Removal,
    ) -> None:
        self._state = state
        self._reload = reload
        self._removal = removal
        self.lobby = Lobby(state)
        fitting = Fitting(state, asking)
        self.fits = FitDesk(state, estimates, fitting)
        self.registration = Registration(
            state,
            commander,
            estimates,
            fitting,
            loading,
            self._admitted,
            self._once_more if self.lobby.open else None,
        )

    def register(self, session: Session, message: Register, *, again: bool = False) -> None:
        """Admit an agent; the same request again gets the same answer. ``again``: this one was
        being carried out already when the worker was lost."""
        registration = self.registration
        if self._state.draining:
            raise error_from_info(draining_error())
        key = AgentKey(session.principal, message.agent)
        spec = spec_of(message, self._state.config.broker, bare_path=session.same_user_ipc)
        agent, pending = self._state.registry.find(key), registration.find(key)
        if agent is not None:
            check_same(key, agent.spec, spec)
            self._registered_already(session, message, agent)
        elif pending is not None:
            check_same(key, pending.spec, spec)
            registration.join(pending, session.peer, message)
        else:
            self._check_room(session.principal)
            devices = self._devices(spec.device)
            ready = tuple(name for name in devices if self._state.devices[name].ready)
            if ready:
                registration.start(key, spec, ready, session.peer, message, again=again)
            else:
                self.lobby.wait(Guest(session.peer, key, message, devices, again))

    def fit(self, session: Session, message: Fit) -> None:
        """What would be admitted? Changes nothing."""
        self.fits.fit(session, message, self._devices(message.device))

    def worker_came(self, device: Device) -> None:
        """The device has a worker: ask everything again that waited for one."""
        for guest in self.lobby.call(device.id):
            self._ask_again(guest.peer, guest.message, guest.again)

    def unregister(self, session: Session, message: Unregister) -> None:
        """Remove an agent, registered or about to be."""
        state = self._state
        key = AgentKey(message.principal or session.principal, message.agent)
        error = ErrorInfo(
            Code.CANCELLED, "agent_removed", f"agent {key.agent!r} was unregistered meanwhile"
        )
        waited = self.lobby.turn_away(error, key)
        pending, agent = self.registration.find(key), state.registry.find(key)
        if pending is not None:
            self.registration.abort(pending, error)
        elif agent is not None or not waited:
            self._removal.remove(
                agent := state.registry.get(key),
                gone_error(agent.key, "as asked"),
                lambda: state.to_client(session.peer, Ok(rid=message.rid)),
            )
            return
        state.to_client(session.peer, Ok(rid=message.rid))

    def cancel(self, principal: str, rid: bytes) -> bool:
        """CANCEL of a REGISTER, wherever it waits, or of a FIT. False if none of the principal has
        the rid."""
        error = cancelled_error()
        return (
            self.registration.cancel(principal, rid, error)
            or self.lobby.cancel(principal, rid, error)
            or self._reload.cancel_waiter(principal, rid, error)
            or self.fits.cancel(principal, rid, error)
        )

    def client_left(self, peer: bytes) -> None:
        """A session has ended."""
        self.lobby.client_left(peer)
        self.registration.client_left(peer)
        self.fits.client_left(peer)

    def end(self, error: ErrorInfo) -> None:
        """End every REGISTER and FIT that is under way."""
        self.fits.end(error)
        self.lobby.turn_away(error)
        for pending in list(self.registration):
            self.registration.abort(pending, error)

    def list_agents(self, session: Session, message: List) -> None:
        """The principal's agents."""
        agents = list(self._state.registry.of(session.principal))
        body = AgentList(agents=agent_list(self._state, agents))
        self._state.to_client(session.peer, Ok(rid=message.rid, body=msgspec.to_builtins(body)))

    def returned(self, agent: Agent, error: ErrorInfo | None, waiters: list[Who]) -> None:
        """An agent is back, or is not. Without its worker it waits, as at any other time."""
        for peer, rid in waiters:
            if error is None or agent.state == "waiting":
                self._ok(peer, rid, agent)
            else:
                self._state.fail(peer, rid, error)

    # --- parts --------------------------------------------------------------------------------

    def _admitted(self, agent: Agent, waiters: Iterable[Who]) -> None:
        """A registration has succeeded: from now on the agent exists."""
        state = self._state
        state.registry.add(agent)
        for peer, _ in waiters if agent.spec.ephemeral else ():
            self._own(agent, peer)
        state.append(
            AgentRegistered(
                agent=agent.key, spec=agent.spec, device=agent.device, model=agent.model
            )
        )
        state.used(agent)
        self._removal.watch_idle(agent)
        state.log("info", "agent_registered", agent=str(agent.key), device=agent.device)
        for peer, rid in waiters:
            self._ok(peer, rid, agent)

    def _once_more(self, peer: bytes, message: Register) -> None:
        """The worker was lost while it was being carried out."""
        self._ask_again(peer, message, again=True)

    def _ask_again(self, peer: bytes, message: Register, again: bool) -> None:
        session = self._state.sessions.find(peer)
        if session is None:
            return
        try:
            self.register(session, message, again=again)
        except ConductorError as error:
            self._state.fail(peer, message.rid, error.info)

    def _registered_already(self, session: Session, message: Register, agent: Agent) -> None:
        """If it is suspended, it is tried once more; if it is on its way back, the answer is what
        comes of that."""
        self._state.used(agent)
        if agent.spec.ephemeral:
            self._own(agent, session.peer)
        device = self._state.devices[agent.device]
        if agent.state == "suspended" and not device.ready:
            if not self._state.serves(device.id):
                raise error_from_info(unconfigured_error(device.id))
            self.lobby.wait(Guest(session.peer, agent.key, message, (device.id,), again=False))
        elif agent.state in ("suspended", "loading"):
            self._reload.begin(agent, (session.peer, message.rid))
        else:
            self._ok(session.peer, message.rid, agent)

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
        pending = [item.key.principal for item in self.registration]
        own = state.registry.count(principal) + pending.count(principal)
        check_quota(principal, "agents", own, 1, quota_of(state, principal).agents)
        deny = admission.check_agents(len(state.registry) + len(pending), own)
        if deny is not None:
            raise error_from_info(refusal.error(deny))

    def _devices(self, wanted: str | None) -> tuple[str, ...]:
        """Which devices may take the agent: the wanted one, or all that a worker can serve."""
        names = sorted(name for name in self._state.devices if self._state.serves(name))
        if wanted is None:
            return tuple(names)
        if wanted not in names:
            raise NotFound(
                "no_such_device",
                f"there is no device {wanted!r}; known: {', '.join(names) or 'none'}",
                device=wanted,
                devices=names,
            )
        return (wanted,)
