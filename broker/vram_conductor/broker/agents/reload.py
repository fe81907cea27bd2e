"""Agents that come back (*pure*): after a worker's or a broker's restart, or when there is room.

An agent whose bytes are still promised is simply loaded again. One that came from the journal
asks like a new one; if it does not fit any more it stays registered, suspended with the reason,
and is tried again when bytes become free. One that is suspended for another reason (its file was
missing) is tried again when it is used: what kept it may have passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from vram_conductor.broker.agents.estimates import Answer, Estimates, Inquiry
from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.lobby import Who, check_waiters
from vram_conductor.broker.agents.model_change import (
    MODEL_CHANGED,
    has_transcripts,
    model_changed,
)
from vram_conductor.broker.journal.records import AgentRegistered
from vram_conductor.broker.ledger import refusal
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.claims import Claim, Measured
from vram_conductor.broker.ledger.decisions import Admit, Committed, Deny, Reservation, Stale
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.errors import ConductorError, ErrorInfo
from vram_conductor.protocol.messages import Progress
from vram_conductor.protocol.values import AgentKey, ModelInfo, PoolShape

AGAIN_NS = 2_000_000_000
"""A suspended agent that is used is tried again, but not more often than this."""


@dataclass(slots=True)
class Return:
    """One agent on its way back. ``waiters``: REGISTERs that want to know."""

    agent: Agent
    waiters: list[Who] = field(default_factory=list)
    inquiry: Inquiry | None = None
    reservation: Reservation | None = None
    model: ModelInfo | None = None
    shape: PoolShape | None = None
    op: int = 0


class Reload:
    """All agents on their way back.

    Args:
        suspended: called with an agent that could not come back, and why.
        returned: called with an agent, why it is not ready (None: it is), and who waited for it.
    """

    def __init__(
        self,
        state: State,
        commander: Commander,
        estimates: Estimates,
        loading: Loading,
        suspended: Callable[[Agent, ErrorInfo], None],
        returned: Callable[[Agent, ErrorInfo | None, list[Who]], None],
    ) -> None:
        self._state = state
        self._commander = commander
        self._estimates = estimates
        self._loading = loading
        self._suspended = suspended
        self._returned = returned
        self._returns: dict[AgentKey, Return] = {}
        self._denied: dict[AgentKey, Claim] = {}
        self._failed_ns: dict[AgentKey, int] = {}

    def __contains__(self, key: AgentKey) -> bool:
        return key in self._returns

    def __iter__(self) -> Iterator[AgentKey]:
        return iter(self._returns)

    def welcomed(self, device: Device) -> None:
        """The device has a worker: bring back its agents, those with promised bytes first. What
        they take with another library build has to be asked anew."""
        agents = list(self._state.registry.on(device.id))
        for agent in agents if device.former_build else ():
            device.ledger.release(agent.key)
        for agent in sorted(agents, key=lambda item: item.key not in device.ledger):
            self.begin(agent)

    def lost(self, device: Device) -> None:
        """The device has lost its worker: all its agents wait for the next one."""
        for agent in self._state.registry.on(device.id):
            if agent.state != "suspended":
                agent.state = "waiting"

    def retry(self, device: Device) -> None:
        """Bytes became free: bring back the suspended agents that fit now."""
        for agent in list(self._state.registry.on(device.id)):
            claim = self._denied.get(agent.key)
            if agent.state != "suspended" or claim is None or not device.ready:
                continue
            answer = device.ledger.decide(claim, self._state.now_ns, returning=True)
            if not isinstance(answer, Deny):
                self.begin(agent)

    def may_try(self, agent: Agent) -> bool:
        """Whether a suspended agent that is used is worth another try. Of one that was denied, the
        ledger tells by itself when it fits."""
        due_ns = self._failed_ns.get(agent.key, 0) + AGAIN_NS
        ready = self._state.devices[agent.device].ready
        return ready and agent.key not in self._denied and self._state.now_ns >= due_ns

    def reconsider(self, agent: Agent) -> None:
        """A conversation was reset: where its tokens were all that kept the agent from going on
        with another file, bring it back."""
        reason = agent.reason.reason if agent.reason is not None else ""
        ready = self._state.devices[agent.device].ready
        waits = agent.state == "suspended" and reason == MODEL_CHANGED and ready
        if waits and not has_transcripts(agent):
            self.begin(agent)

    def cancel_waiter(self, principal: str, rid: bytes, error: ErrorInfo) -> bool:
        """CANCEL of a REGISTER that waits for a return, which goes on. False if none has it."""
        for key, back in self._returns.items():
            mine = [who for who in back.waiters if key.principal == principal and who[1] == rid]
            for who in mine:
                back.waiters.remove(who)
                self._state.fail(*who, error)
            if mine:
                return True
        return False

    def begin(self, agent: Agent, who: Who | None = None) -> None:
        """Bring an agent back, unless that is happening already. ``who`` wants to know.

        Raises ResourceExhausted ``too_many_waiters``.
        """
        back = self._returns.get(agent.key)
        if back is not None:
            if who is not None and who not in back.waiters:
                check_waiters(f"agent {agent.key.agent!r}", len(back.waiters))
                back.waiters.append(who)
                stage = "load" if back.op else "estimate"
                self._state.to_client(who[0], Progress(rid=who[1], stage=stage))
            return
        device = self._state.devices[agent.device]
        back = self._returns[agent.key] = Return(agent, [who] if who is not None else [])
        self._denied.pop(agent.key, None)
        self._failed_ns.pop(agent.key, None)
        agent.state, agent.reason = "loading", None
        if agent.key in device.ledger:
            self._load(back, device, agent.model)
            return
        back.inquiry = Inquiry(
            agent.key,
            agent.spec,
            (device.id,),
            lambda answer: self._answered(back, answer),
            returning=True,
        )
        self._estimates.ask(back.inquiry)

    def cancel(self, agent: Agent, error: ErrorInfo) -> None:
        """The agent is being removed. Its bytes are released by the caller."""
        self._denied.pop(agent.key, None)
        self._failed_ns.pop(agent.key, None)
        back = self._returns.pop(agent.key, None)
        if back is None:
            return
        if back.inquiry is not None:
            self._estimates.cancel(back.inquiry)
        if back.op:
            self._commander.drop(self._state.devices[agent.device], back.op)
        self._returned(agent, error, back.waiters)

    # --- steps --------------------------------------------------------------------------------

    def _answered(self, back: Return, answer: Answer) -> None:
        device = self._state.devices[back.agent.device]
        if isinstance(answer, Refusal):
            self._denied_by(back, answer.denies[0])
        elif isinstance(answer, ErrorInfo):
            self._fail(back, answer)
        else:
            self._reserve(back, device, answer)

    def _reserve(self, back: Return, device: Device, admit: Admit) -> None:
        assert back.inquiry is not None
        model = back.inquiry.models[device.id]
        error = model_changed(back.agent, model)
        if error is not None:
            self._fail(back, error)
            return
        claim = back.inquiry.claim(device.id)
        answer = device.ledger.reserve(claim, self._state.now_ns, returning=True)
        assert not isinstance(answer, Stale), "the ledger admitted it in this very event"
        if isinstance(answer, Deny):
            self._denied_by(back, answer)
            return
        back.reservation = answer
        self._load(back, device, model)

    def _load(self, back: Return, device: Device, model: ModelInfo) -> None:
        pool = device.ledger.pool(model.model, back.agent.spec.kv_type)
        back.model = model
        back.shape = None if pool is None else pool.shape
        back.op = self._loading.load(
            device,
            back.agent.key,
            model,
            back.agent.spec,
            lambda result: self._loaded(back, device, result),
        )

    def _loaded(self, back: Return, device: Device, result: Loaded | ErrorInfo) -> None:
        if isinstance(result, ErrorInfo):
            self._unload(back, device)
            self._fail(back, result)
            return
        ledger, agent = device.ledger, back.agent
        assert back.model is not None
        model = msgspec.structs.replace(back.model, digest=result.digest or back.model.digest)
        changed = model_changed(agent, model)
        if changed is not None:
            self._unload(back, device)
            self._fail(back, changed)
            return
        try:
            measured = Measured.of(result)
            answer: Committed | Deny | None
            if back.reservation is not None:
                answer = ledger.commit(back.reservation, measured)
            else:
                answer = ledger.measured(agent.model.model, measured, back.shape)
        except ConductorError as error:
            self._unload(back, device)
            self._fail(back, error.info)
            return
        if isinstance(answer, Deny):
            self._unload(back, device)
            self._fail(back, refusal.error(answer, back.agent.key.principal))
            return
        self._finish(back, model)

    def _finish(self, back: Return, model: ModelInfo) -> None:
        agent = back.agent
        del self._returns[agent.key]
        if model.digest is None and model.model == agent.model.model:
            model = msgspec.structs.replace(model, digest=agent.model.digest)
        if model != agent.model:
            agent.model = model
            self._state.append(
                AgentRegistered(agent=agent.key, spec=agent.spec, device=agent.device, model=model)
            )
        agent.state = "ready"
        self._state.dispatch_due.add(agent.device)
        self._returned(agent, None, back.waiters)

    def _unload(self, back: Return, device: Device) -> None:
        """Nothing stays: not in the ledger, not at the worker. Without a worker, or with one that
        is leaving, a promise that was committed before stays for the next one."""
        reservation, agent = back.reservation, back.agent
        claim = device.ledger.claim_of(agent.key)
        if reservation is not None:
            device.ledger.rollback(reservation)
        elif device.ready:
            device.ledger.release(agent.key)
        if claim is not None and device.ready:
            self._loading.unload(device, agent.key, claim.model, claim.kv_type)

    def _denied_by(self, back: Return, deny: Deny) -> None:
        if deny.claim is not None:
            self._denied[back.agent.key] = deny.claim
        self._fail(back, refusal.error(deny, back.agent.key.principal))

    def _fail(self, back: Return, error: ErrorInfo) -> None:
        agent = back.agent
        del self._returns[agent.key]
        if not self._state.devices[agent.device].ready:
            agent.state = "waiting"
        else:
            agent.state, agent.reason = "suspended", error
            self._failed_ns[agent.key] = self._state.now_ns
            self._suspended(agent, error)
        self._returned(agent, error, back.waiters)
