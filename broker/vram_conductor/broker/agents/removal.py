"""Agents that go (*pure*): UNREGISTER, idle time, end of a session."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.agents.sweep import Swept, idle_due_ns
from vram_conductor.broker.errors import gone_error
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.journal.records import AgentRemoved
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.sessions import Leave, orphan_ms
from vram_conductor.broker.state import State
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.status import SweepReason
from vram_conductor.protocol.values import AgentKey


class Removal:
    """Takes away what is not wanted any more, and nothing else."""

    def __init__(
        self,
        state: State,
        loading: Loading,
        reload: Reload,
        attempts: Attempts,
    ) -> None:
        self._state = state
        self._loading = loading
        self._reload = reload
        self._attempts = attempts

    def remove(self, agent: Agent, error: ErrorInfo, on_done: Callable[[], None]) -> None:
        """Cancel the agent's jobs with ``error``, release its bytes, forget its conversations.
        ``on_done`` follows when the worker has freed what it held."""
        state = self._state
        key = agent.key
        device = state.devices[agent.device]
        for job in [job for job in state.jobs.live() if job.key.agent_key == key]:
            self._attempts.abandon(job, error)
        self._reload.cancel(agent, error)
        device.ledger.release(key)
        state.registry.remove(key)
        state.timers.cancel(("ttl", key))
        state.timers.cancel(("grace", key))
        for peer in agent.owners:
            session = state.sessions.find(peer)
            if session is not None:
                session.ephemeral.discard(key)
        for conversation in agent.conversations.values():
            device.places.pop(conversation.key, None)
            if device.link is not None:
                device.link.known.pop(conversation.key, None)
        state.append(AgentRemoved(agent=key))
        state.log("info", "agent_removed", agent=str(key), reason=error.reason)
        self._loading.unload(device, key, agent.model.model, agent.spec.kv_type, on_done)

    def session_ended(self, peer: bytes, agents: set[AgentKey], how: Leave) -> None:
        """Ephemeral agents go with the last session that registered them; a client whose
        connection was lost may come back, and they wait for it as its running jobs do."""
        grace_ms = orphan_ms(self._state.config.broker, how)
        for key in sorted(agents):
            agent = self._state.registry.find(key)
            if agent is None:
                continue
            agent.owners.discard(peer)
            if grace_ms:
                self._state.timers.set(("grace", key), self._state.in_ms(grace_ms))
            elif not agent.owners and ("grace", key) not in self._state.timers:
                self._sweep(agent, "session_ended", "its session ended")

    def restored(self, agent: Agent) -> None:
        """The journal had it: its time goes on, and its clients may come back."""
        if agent.spec.ephemeral:
            due_ns = self._state.in_ms(limits.COME_BACK_MS)
            self._state.timers.set(("grace", agent.key), due_ns)
        self.watch_idle(agent)

    def grace_over(self, key: AgentKey) -> None:
        """Nobody else may come back: an ephemeral agent without a session goes."""
        agent = self._state.registry.find(key)
        if agent is not None and not agent.owners:
            self._sweep(agent, "not_back", "none of its clients came back in time")

    def idle(self, key: AgentKey) -> None:
        """The ttl timer of an agent: remove it, or look again later if it was used."""
        agent = self._state.registry.find(key)
        if agent is None:
            return
        due_ns = self._idle_due_ns(agent)
        if due_ns is not None and due_ns <= self._state.now_ns:
            self._sweep(agent, "idle", f"it was idle for {agent.spec.ttl_s} s")
        else:
            self.watch_idle(agent)

    def watch_idle(self, agent: Agent) -> None:
        """Arm the ttl timer, if the agent has one."""
        due_ns = self._idle_due_ns(agent)
        if due_ns is not None:
            self._state.timers.set(("ttl", agent.key), due_ns)

    def _idle_due_ns(self, agent: Agent) -> int | None:
        now_ns = self._state.now_ns
        return idle_due_ns(agent.spec.ttl_s, agent.used_ns, now_ns, busy=agent.busy)

    def _sweep(self, agent: Agent, reason: SweepReason, why: str) -> None:
        swept = Swept(agent.key, agent.device, reason, self._state.now_ns)
        self._state.sweeps.note(swept)
        self.remove(agent, gone_error(agent.key, why), lambda: None)
