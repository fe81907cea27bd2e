"""The broker's core (*pure*): the only mutator of the broker's state.

``handle`` takes one event and returns the effects, in order. It reads no clock and does no IO.
The flows (sessions, registrations, jobs, workers) share one :class:`State`; what one event makes
possible elsewhere (a job can leave the queue, a suspended agent fits) is done before it returns.
"""

from __future__ import annotations

from vram_conductor.broker.agents.agent_desk import AgentDesk
from vram_conductor.broker.agents.asking import Asking
from vram_conductor.broker.agents.estimates import Estimates
from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.lobby import Who
from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.agents.removal import Removal
from vram_conductor.broker.boot import configure, find_device, restore
from vram_conductor.broker.clients import Clients
from vram_conductor.broker.conversations import kv_quota
from vram_conductor.broker.conversations.conversation_desk import ConversationDesk
from vram_conductor.broker.drain import Drainage
from vram_conductor.broker.effects import Effect
from vram_conductor.broker.events import (
    ClientBad,
    ClientFlow,
    ClientGone,
    ClientMessageIn,
    Event,
    JournalTrouble,
    KeysChanged,
    Shutdown,
    Tick,
    WorkerBad,
    WorkerGone,
    WorkerMessageIn,
)
from vram_conductor.broker.invariants import validate
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.jobs.delivery import Delivery
from vram_conductor.broker.jobs.dispatch import Dispatcher
from vram_conductor.broker.jobs.ending import Ending
from vram_conductor.broker.jobs.job_desk import JobDesk
from vram_conductor.broker.journal.restored import Restored
from vram_conductor.broker.leases.lease_desk import LeaseDesk
from vram_conductor.broker.ledger.decisions import LeaseKey
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.report import status_report
from vram_conductor.broker.state import State
from vram_conductor.broker.timers import Key
from vram_conductor.broker.workers.absence import no_worker
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.handover import Handover
from vram_conductor.broker.workers.residency import Samples
from vram_conductor.broker.workers.workers import WorkerHooks, Workers
from vram_conductor.protocol.commands import Ready, Residency
from vram_conductor.protocol.config import Config
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.status import StatusReport
from vram_conductor.protocol.values import AgentKey


class Core:
    """State of one broker process.

    Args:
        config: validated configuration; ``config.device`` lists the devices. If it lists none,
            any device that a worker brings is taken.
        broker_epoch: larger than that of every earlier broker; already in the journal.
        restored: the folded journal. The core takes it over; don't use it afterwards.
        now_ns: monotonic time, as in every later call.
        version: of the package, for STATUS.
        unix_ns: the time of day at ``now_ns``; None: ``now_ns`` itself.
    """

    def __init__(
        self,
        config: Config,
        broker_epoch: int,
        restored: Restored,
        now_ns: int,
        version: str = "",
        unix_ns: int | None = None,
    ) -> None:
        state = self._state = State(config, broker_epoch, now_ns, version, unix_ns)
        commander = self._commander = Commander(state)
        delivery = self._delivery = Delivery(state)
        self._ending = Ending(state, delivery)
        attempts = Attempts(state, commander, delivery, self._ending)
        self._dispatcher = Dispatcher(state, commander, attempts, self._ending)
        asking = self._asking = Asking(state, commander)
        estimates, loading = Estimates(state, asking), Loading(state, commander)
        self._reload = Reload(
            state, commander, estimates, loading, self._agent_suspended, self._agent_returned
        )
        self._jobs = JobDesk(state, delivery, attempts, self._reload)
        self._removal = Removal(state, loading, self._reload, attempts)
        agents = self._agents = AgentDesk(
            state, commander, asking, estimates, loading, self._reload, self._removal
        )
        self._leases = LeaseDesk(state, commander)
        talks = ConversationDesk(state, commander, self._reload.reconsider)
        handover = self._handover = Handover(
            state, commander, lambda device, error: self._workers.lose(device, error)
        )
        self._clients = Clients(
            state, agents, self._jobs, talks, self._removal, self._leases, handover
        )
        self._samples = Samples(state, commander)
        hooks = WorkerHooks(self._worker_welcomed, self._worker_lost, self._reported)
        self._workers = Workers(state, commander, lambda ready: find_device(state, ready), hooks)
        self._drainage = Drainage(state, commander, self._clients, agents, attempts, self._leases)
        configure(state, restored)
        restore(state, restored, self._removal)
        self._leases.restore(restored)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """React to one event. Never raises for what peers send. After an Exit effect nothing
        happens any more."""
        state = self._state
        if self._drainage.exited:
            return []
        state.now_ns = max(state.now_ns, now_ns)
        state.effects = []
        match event:
            case WorkerMessageIn():
                self._workers.message(event)
            case ClientMessageIn():
                self._clients.message(event)
            case Tick():
                for key in state.timers.due(state.now_ns):
                    self._expire(key)
            case ClientBad(peer=peer, error=error, rid=rid):
                self._clients.bad(peer, error, rid)
            case ClientGone(peer=peer, dead=dead):
                self._clients.left(peer, "dead" if dead else "lost")
            case ClientFlow(peer=peer, behind=behind):
                session = state.sessions.find(peer)
                if session is not None:
                    self._delivery.flow(session, behind=behind)
            case WorkerBad(peer=peer, error=error):
                self._workers.bad(peer, error)
            case WorkerGone(peer=peer, dead=dead):
                self._workers.gone(peer, dead=dead)
            case Shutdown(drain_ms=drain_ms):
                self._drainage.start(drain_ms)
            case KeysChanged(quotas=quotas, keys=keys):
                state.quotas = quotas
                self._clients.revoke(keys)
                self._workers.revoke(keys)
            case JournalTrouble(why=why):
                state.journal_trouble = why
        self._settle()
        return state.effects

    def next_deadline_ns(self) -> int | None:
        """When to send a Tick at the latest; None if nothing is waiting for time to pass."""
        return self._state.timers.next_ns()

    def report(self, now_ns: int) -> StatusReport:
        """The whole picture, all principals."""
        self._state.now_ns = max(self._state.now_ns, now_ns)
        return status_report(self._state, None)

    def validate_state(self) -> None:
        """Check that everything agrees with everything. O(everything): for tests.

        Raises:
            AssertionError: our bug.
        """
        validate(self._state, self._agents, self._reload)

    # --- what follows -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what the event has made possible, until nothing more is."""
        state = self._state
        while state.dispatch_due or state.admission_due:
            while state.admission_due:
                device = state.devices.get(state.admission_due.pop())
                if device is not None and device.ready and not state.draining:
                    self._reload.retry(device)
            while state.dispatch_due:
                device = state.devices.get(state.dispatch_due.pop())
                if device is not None:
                    self._dispatcher.dispatch(device)
        self._drainage.check()

    def _worker_welcomed(self, device: Device, ready: Ready) -> None:
        self._samples.welcomed(device, ready)
        self._reload.welcomed(device)
        self._agents.worker_came(device)
        self._state.dispatch_due.add(device.id)

    def _reported(self, device: Device, report: Residency) -> None:
        self._samples.report(device, report)
        kv_quota.reported(self._state, self._commander, device)
        self._leases.granting.sampled(device)

    def _worker_lost(self, device: Device, error: ErrorInfo) -> None:
        self._leases.granting.lost(device, error)
        self._asking.lost(device)
        self._reload.lost(device)
        self._handover.lost(device, error)

    def _agent_suspended(self, agent: Agent, error: ErrorInfo) -> None:
        self._jobs.fail_waiting(agent.device, error, agent.key)

    def _agent_returned(self, agent: Agent, error: ErrorInfo | None, waiters: list[Who]) -> None:
        self._agents.returned(agent, error, waiters)

    def _expire(self, key: Key) -> None:
        what, who = key
        state = self._state
        match what, who:
            case ("session", bytes()):
                self._clients.check_alive(who)
            case ("queue" | "deadline" | "orphan" | "stop", int()):
                self._jobs.expire(what, who)
            case ("result", int()):
                job = state.jobs.find(who)
                if job is not None:
                    self._ending.forget(job)
            case ("guest", (bytes() as peer, bytes() as rid)):
                self._agents.lobby.expire(peer, rid)
            case ("op", (str() as name, int() as op)):
                self._commander.expire(state.devices[name], op)
            case ("worker", str()):
                self._workers.check_alive(state.devices[who])
            case ("candidate", str()):
                self._workers.candidate_due(state.devices[who])
            case ("leave", str()):
                self._handover.overdue(state.devices[who])
            case ("absent", str()):
                if state.devices[who].link is None:
                    self._jobs.fail_waiting(who, no_worker(state, who))
            case ("lease", LeaseKey()):
                self._leases.expire(who)
            case ("lease_wait", LeaseKey()):
                self._leases.expire_wait(who)
            case ("pump", _):
                self._delivery.turn()
            case ("drain", _):
                self._drainage.give_up()
            case ("ttl", AgentKey()):
                self._removal.idle(who)
            case ("grace", AgentKey()):
                self._removal.grace_over(who)
            case _:
                raise AssertionError(f"unknown timer {what}")
