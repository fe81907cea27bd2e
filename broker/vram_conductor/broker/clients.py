"""The clients' side of the core (*pure*): sessions, and each message to whom it concerns."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vram_conductor.broker.agents.agent_desk import AgentDesk
from vram_conductor.broker.agents.removal import Removal
from vram_conductor.broker.conversations.conversation_desk import ConversationDesk
from vram_conductor.broker.effects import SendClient
from vram_conductor.broker.events import ClientMessageIn
from vram_conductor.broker.jobs.job_desk import JobDesk
from vram_conductor.broker.leases.lease_desk import LeaseDesk
from vram_conductor.broker.permissions import check_role, revoked
from vram_conductor.broker.report import status_report
from vram_conductor.broker.sessions import FEATURES, Leave, Session, announced_limits
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.handover import Handover
from vram_conductor.broker.workers.welcome import VERSION
from vram_conductor.protocol import validate
from vram_conductor.protocol.conversations import Fork, History
from vram_conductor.protocol.drain import DrainDevice
from vram_conductor.protocol.errors import ConductorError
from vram_conductor.protocol.fitting import Fit
from vram_conductor.protocol.liveness import Liveness
from vram_conductor.protocol.messages import (
    Bye,
    Cancel,
    ClientMessage,
    Credit,
    Decode,
    Error,
    GoAway,
    Hello,
    Lease,
    List,
    Ok,
    Ping,
    Pong,
    Register,
    Reset,
    Resume,
    Status,
    Unregister,
    Welcome,
)


class Clients:
    """Opens and closes sessions; a session's requests go to the desks."""

    def __init__(
        self,
        state: State,
        agents: AgentDesk,
        jobs: JobDesk,
        conversations: ConversationDesk,
        removal: Removal,
        leases: LeaseDesk,
        handover: Handover,
    ) -> None:
        self._state = state
        self._agents = agents
        self._jobs = jobs
        self._conversations = conversations
        self._removal = removal
        self._leases = leases
        self._handover = handover

    def message(self, event: ClientMessageIn) -> None:
        """One message of a client; what is wrong with it is answered with ERROR."""
        peer, message = event.peer, event.message
        session = self._state.sessions.find(peer)
        if session is not None:
            session.liveness.heard(self._state.now_ns)
            session.role = event.role
        try:
            validate.check(message)
            if isinstance(message, Hello):
                self._hello(event)
            else:
                self._request(self._state.sessions.get(peer), message)
        except ConductorError as error:
            self.bad(peer, error, getattr(message, "rid", b""))

    def bad(self, peer: bytes, error: ConductorError, rid: bytes = b"") -> None:
        """Answer a peer, with or without a session, that something was wrong."""
        self._state.effects.append(SendClient(peer, Error(rid=rid, error=error.info)))

    def left(self, peer: bytes, how: Leave) -> None:
        """The session is over; nothing is sent to the peer any more. Idempotent."""
        session = self._state.sessions.close(peer)
        if session is None:
            return
        self._state.timers.cancel(("session", peer))
        self._state.log("info", "session_closed", session=session.session, how=how)
        self._agents.client_left(peer)
        self._jobs.client_left(session, how)
        self._removal.session_ended(peer, session.ephemeral, how)
        self._leases.client_left(peer, session.leases)

    def revoke(self, keys: Mapping[str, str]) -> None:
        """Only these keys count from now on, each for its principal."""
        for session in self._state.sessions:
            if session.key and keys.get(session.key) != session.principal:
                self.bad(session.peer, revoked())
                self.left(session.peer, "revoked")

    def check_alive(self, peer: bytes) -> None:
        """The timer of a session."""
        session = self._state.sessions.find(peer)
        if session is None:
            return
        if session.liveness.dead(self._state.now_ns):
            self.left(peer, "lost")
        else:
            self._watch(session)

    def go_away(self, drain_ms: int) -> None:
        """Tell every client that the broker is leaving."""
        for session in self._state.sessions:
            self._state.to_client(
                session.peer, GoAway(reason="the broker is shutting down", drain_ms=drain_ms)
            )

    # --- requests -----------------------------------------------------------------------------

    def _hello(self, event: ClientMessageIn) -> None:
        state, peer, principal = self._state, event.peer, event.principal
        heartbeat_ms = state.config.broker.heartbeat_ms
        liveness = Liveness(state.now_ns, heartbeat_ms, pings=False)
        session = state.sessions.open(peer, principal, event.same_user_ipc, liveness, event.key)
        session.role = event.role
        state.log("info", "session_opened", session=session.session, principal=principal)
        self._watch(session)
        state.to_client(
            peer,
            Welcome(
                v=VERSION,
                session=session.session,
                broker_epoch=state.broker_epoch,
                principal=principal,
                heartbeat_ms=heartbeat_ms,
                limits=announced_limits(state.config.broker),
                features=FEATURES,
            ),
        )

    def _request(self, session: Session, message: ClientMessage) -> None:
        check_role(session, message)
        match message:
            case Decode():
                self._jobs.decode(session, message)
            case Credit():
                self._jobs.credit(session, message)
            case Ping():
                self._state.to_client(session.peer, Pong(n=message.n))
            case Resume():
                self._jobs.resume(session, message)
            case Cancel():
                self._cancel(session, message)
            case Register():
                self._agents.register(session, message)
            case Fit():
                self._agents.fit(session, message)
            case Unregister():
                self._agents.unregister(session, message)
            case Reset():
                self._conversations.reset(session, message)
            case Fork():
                self._conversations.fork(session, message)
            case History():
                self._conversations.history(session, message)
            case Lease():
                self._leases.lease(session, message)
            case DrainDevice():
                self._handover.drain(session, message)
            case List():
                self._agents.list_agents(session, message)
            case Status():
                whose = None if session.role == "admin" else session.principal
                report = status_report(self._state, whose)
                body = msgspec.to_builtins(report)
                self._state.to_client(session.peer, Ok(rid=message.rid, body=body))
            case Bye():
                self.left(session.peer, "bye")
            case Hello():  # it opened the session
                pass

    def _cancel(self, session: Session, message: Cancel) -> None:
        principal, rid = session.principal, message.rid
        if not (self._agents.cancel(principal, rid) or self._leases.cancel(principal, rid)):
            self._jobs.cancel(session, rid)

    def _watch(self, session: Session) -> None:
        self._state.timers.set(("session", session.peer), session.liveness.next_ns())
