"""Agents that go (*pure*): UNREGISTER, idle time, end of a session."""

from __future__ import annotations

from collections.abc import Callable

from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.reload import Reload
from vram_conductor.broker.errors import gone_error
from vram_conductor.broker.jobs.attempts import Attempts
from vram_conductor.broker.journal.records import AgentRemoved
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.state import State
from vram_conductor.protocol.errors import ErrorInfo
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
        for peer in agent.owners:
            session = state.sessions.find(peer)
            if session is not None:
                session.ephemeral.discard(key)
        for conversation in agent.conversations.values():
            device.places.pop(conversation.key, None)
            if device.link is not None:
                device.link.known.pop(conversation.key, None)
        if not agent.spec.ephemeral:
            state.append(AgentRemoved(agent=key))
        state.log("info", "agent_removed", agent=str(key), reason=error.reason)
        self._loading.unload(device, key, agent.model.model, agent.spec.kv_type, on_done)

    def session_ended(self, peer: bytes, agents: set[AgentKey]) -> None:
        """Ephemeral agents go with the last session that registered them."""
        for key in sorted(agents):
            agent = self._state.registry.find(key)
            if agent is None:
                continue
            agent.owners.discard(peer)
            if not agent.owners:
                self.remove(agent, gone_error(agent.key, "its session ended"), lambda: None)

    def idle(self, key: AgentKey) -> None:
        """The ttl timer of an agent: remove it, or look again later if it was used."""
        agent = self._state.registry.find(key)
        if agent is None or agent.spec.ttl_s is None:
            return
        due_ns = agent.used_ns + agent.spec.ttl_s * 1_000_000_000
        if agent.busy or self._state.now_ns < due_ns:
            self.watch_idle(agent)
        else:
            error = gone_error(agent.key, f"it was idle for {agent.spec.ttl_s} s")
            self.remove(agent, error, lambda: None)

    def watch_idle(self, agent: Agent) -> None:
        """Arm the ttl timer, if the agent has one."""
        ttl_s = agent.spec.ttl_s
        if ttl_s is not None:
            since_ns = self._state.now_ns if agent.busy else agent.used_ns
            self._state.timers.set(("ttl", agent.key), since_ns + ttl_s * 1_000_000_000)
