"""Shutting down in order (*pure*): no new work, finish what runs, let the workers park, leave."""

from __future__ import annotations

from vram_conductor.broker.agents.agent_desk import AgentDesk
from vram_conductor.broker.clients import Clients
from vram_conductor.broker.effects import Exit
from vram_conductor.broker.errors import draining_error
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.leases.lease_desk import LeaseDesk
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.protocol.commands import Drain

CUT_OFF_MS = 4_000
"""How long a worker may take to say what it has cut off at the end of the time. Its last tokens are
in the state that it parks, and a record without them is of no use to that state. Less than the 5 s
after which a supervisor does not wait for us any more."""


class Drainage:
    """The way from SIGTERM to Exit.

    Attributes:
        exited: the Exit effect was given out.
    """

    def __init__(
        self,
        state: State,
        commander: Commander,
        clients: Clients,
        agents: AgentDesk,
        attempts: Attempts,
        leases: LeaseDesk,
    ) -> None:
        self._state = state
        self._commander = commander
        self._clients = clients
        self._agents = agents
        self._attempts = attempts
        self._leases = leases
        self.exited = False

    def start(self, drain_ms: int) -> None:
        """GOAWAY to the clients, DRAIN to the workers. The second time: leave at once."""
        state = self._state
        if state.draining:
            self.give_up()
            return
        self._clients.go_away(drain_ms)
        self._agents.end(draining_error())
        self._leases.end_pending(draining_error())
        for job in list(state.queue):
            self._attempts.stop(job, draining_error())
        state.draining = True
        for job in state.jobs.live():
            if job.stopping is None:
                # Counts only if the worker stops the job, not if it finishes in time.
                job.stopping = draining_error()
        for device in state.devices.values():
            if device.link is not None:
                device.link.draining = True
                self._commander.send(
                    device,
                    lambda epoch, op: Drain(broker_epoch=epoch, op=op, drain_ms=drain_ms),
                )
        # The workers' time began later than ours: they end what still runs, and we hear of it.
        state.timers.set(("drain", None), state.in_ms(drain_ms + CUT_OFF_MS))

    def check(self) -> None:
        """Leave when the last worker has left."""
        state = self._state
        if state.draining and not any(device.link for device in state.devices.values()):
            self.give_up()

    def give_up(self) -> None:
        """Leave now; what still runs is reported as stopped, and its tokens are kept."""
        state = self._state
        if self.exited:
            return
        self.exited = True
        for job in list(state.jobs.live()):
            self._attempts.abandon(job, draining_error())
        state.effects.append(Exit(0))
