"""REGISTER (*pure*): estimate → reserve → load → commit, undone at every failure.

An agent enters the registry only when its load has succeeded. Until then it is a pending
registration, which any number of clients may wait for; it is given up when the last one cancels.
If the worker is lost meanwhile, nothing was promised: it starts over, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

import msgspec

from vram_conductor.broker.agents.estimates import Answer, Estimates, Inquiry
from vram_conductor.broker.agents.fitting import Fitting, Probe
from vram_conductor.broker.agents.loading import Loading
from vram_conductor.broker.agents.lobby import Who, check_waiters
from vram_conductor.broker.agents.spec import within_training
from vram_conductor.broker.errors import lost_error
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.ledger import admission, refusal
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.claims import Measured
from vram_conductor.broker.ledger.decisions import Admit, Deny, Reservation, Stale
from vram_conductor.broker.permissions import within_quota
from vram_conductor.broker.registry import Agent
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.commanding import Commander
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.commands import Loaded
from vram_conductor.protocol.errors import Code, ConductorError, ErrorInfo
from vram_conductor.protocol.messages import Progress, Register
from vram_conductor.protocol.values import AgentKey, ModelInfo


@dataclass(slots=True)
class Pending:
    """A registration under way.

    Attributes:
        waiters: every REGISTER that gets the answer.
        again: it has started over already.
        op: of the LOAD, once there is one.
    """

    key: AgentKey
    spec: AgentSpec
    inquiry: Inquiry
    again: bool
    waiters: dict[Who, Register] = field(default_factory=dict)
    probe: Probe | None = None
    reservation: Reservation | None = None
    model: ModelInfo | None = None
    op: int = 0


class Registration:
    """All registrations under way.

    Args:
        admitted: takes the new agent into the registry and answers the waiters.
        once_more: asks a REGISTER again whose worker was lost; None: it must not.
    """

    def __init__(
        self,
        state: State,
        commander: Commander,
        estimates: Estimates,
        fitting: Fitting,
        loading: Loading,
        admitted: Callable[[Agent, Iterable[Who]], None],
        once_more: Callable[[bytes, Register], None] | None,
    ) -> None:
        self._state = state
        self._commander = commander
        self._estimates = estimates
        self._fitting = fitting
        self._loading = loading
        self._admitted = admitted
        self._once_more = once_more
        self._pending: dict[AgentKey, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending.values())

    def find(self, key: AgentKey) -> Pending | None:
        return self._pending.get(key)

    def start(
        self,
        key: AgentKey,
        spec: AgentSpec,
        devices: tuple[str, ...],
        peer: bytes,
        message: Register,
        *,
        again: bool,
    ) -> None:
        """Begin: the answer goes to everybody who waits by then. ``again``: the worker was lost
        the first time."""
        pending = Pending(key, spec, self._inquiry(key, spec, devices), again)
        self._pending[key] = pending
        self.join(pending, peer, message)
        self._progress(pending, "estimate")
        self._estimates.ask(pending.inquiry)

    def join(self, pending: Pending, peer: bytes, message: Register) -> None:
        """One more wants the answer; asking twice is asking once.

        Raises ResourceExhausted ``too_many_waiters``.
        """
        if (peer, message.rid) in pending.waiters:
            return
        check_waiters(f"agent {pending.key.agent!r}", len(pending.waiters))
        pending.waiters[peer, message.rid] = message

    def cancel(self, principal: str, rid: bytes, error: ErrorInfo) -> bool:
        """CANCEL of a REGISTER. False if no registration of the principal has this rid."""
        for pending in list(self):
            if pending.key.principal != principal:
                continue
            mine = [waiter for waiter in pending.waiters if waiter[1] == rid]
            if not mine:
                continue
            for waiter in mine:
                del pending.waiters[waiter]
                self._state.fail(*waiter, error)
            if not pending.waiters:
                self.abort(pending, error)
            return True
        return False

    def client_left(self, peer: bytes) -> None:
        """A session has ended. What it asked for is finished all the same, unless it was to last
        no longer than the session."""
        for pending in list(self):
            for waiter in [waiter for waiter in pending.waiters if waiter[0] == peer]:
                del pending.waiters[waiter]
            if pending.spec.ephemeral and not pending.waiters:
                self.abort(
                    pending, ErrorInfo(Code.CANCELLED, "client_gone", "the client went away")
                )

    def abort(self, pending: Pending, error: ErrorInfo) -> None:
        """Give up, wherever it stands; what was done is undone."""
        self._estimates.cancel(pending.inquiry)
        if pending.probe is not None:
            self._fitting.cancel(pending.probe)
        reservation = pending.reservation
        if reservation is not None:
            device = self._state.devices[reservation.device]
            self._commander.drop(device, pending.op)
            self._roll_back(pending, device)
        self._fail(pending, error)

    # --- steps --------------------------------------------------------------------------------

    def _within(self, pending: Pending, answer: Answer) -> None:
        self._answered(pending, within_quota(self._state, pending.inquiry, answer))

    def _answered(self, pending: Pending, answer: Answer) -> None:
        match answer:
            case Admit():
                self._reserve(pending, answer)
            case Refusal() if pending.inquiry.lost:
                lost = answer.closest.device in pending.inquiry.lost
                error = (
                    lost_error(answer.closest.device)
                    if lost
                    else refusal.error(answer, pending.key.principal)
                )
                self._lost(pending, error)
            case Refusal():
                answer = Refusal((*answer.denies, *self._not_asked(pending)))
                pending.probe = self._fitting.probe(
                    pending.inquiry, answer, lambda full: self._refused(pending, full)
                )
            case ErrorInfo():
                shorter = within_training(pending.spec, answer)
                if shorter is None:
                    self._fail(pending, answer)
                else:
                    self._ask_again(pending, shorter)

    def _inquiry(self, key: AgentKey, spec: AgentSpec, devices: tuple[str, ...]) -> Inquiry:
        return Inquiry(key, spec, devices, lambda answer: self._within(self._pending[key], answer))

    def _ask_again(self, pending: Pending, spec: AgentSpec) -> None:
        """The configuration's n_ctx is more than the model can have: a default is no demand."""
        self._progress(
            pending,
            "estimate",
            note=f"the default n_ctx {pending.spec.n_ctx} is beyond the {spec.n_ctx} tokens that "
            f"{spec.model} was trained with: taking n_ctx {spec.n_ctx}",
        )
        pending.spec = spec
        pending.inquiry = self._inquiry(pending.key, spec, pending.inquiry.devices)
        self._estimates.ask(pending.inquiry)

    def _not_asked(self, pending: Pending) -> list[Deny]:
        """Devices that might have taken the agent, if they had a worker."""
        if pending.spec.device is not None:
            return []
        state, asked = self._state, pending.inquiry.devices
        names = [name for name in state.devices if state.serves(name) and name not in asked]
        return [admission.no_worker(name) for name in sorted(names)]

    def _refused(self, pending: Pending, answer: Refusal) -> None:
        self._fail(pending, refusal.error(answer, pending.key.principal))

    def _reserve(self, pending: Pending, admit: Admit) -> None:
        device = self._state.devices[admit.device]
        answer = device.ledger.reserve(pending.inquiry.claim(device.id), self._state.now_ns)
        assert not isinstance(answer, Stale), "the ledger admitted it in this very event"
        if isinstance(answer, Deny):
            self._refused(pending, Refusal((answer,)))
            return
        pending.reservation = answer
        pending.model = pending.inquiry.models[device.id]
        self._progress(pending, "load", total=pending.model.file_bytes)
        pending.op = self._loading.load(
            device, pending.key, pending.model, pending.spec, partial(self._loaded, pending)
        )

    def _loaded(self, pending: Pending, result: Loaded | ErrorInfo) -> None:
        reservation = pending.reservation
        assert reservation is not None
        device = self._state.devices[reservation.device]
        if isinstance(result, ErrorInfo):
            self._roll_back(pending, device)
            if not device.ready:
                self._lost(pending, result)
            else:
                self._fail(pending, result)
            return
        try:
            answer = device.ledger.commit(reservation, Measured.of(result))
        except ConductorError as error:
            self._roll_back(pending, device)
            self._fail(pending, error.info)
            return
        if isinstance(answer, Deny):
            self._roll_back(pending, device)
            self._fail(pending, refusal.error(answer, pending.key.principal))
            return
        self._commit(pending, device, result)

    def _commit(self, pending: Pending, device: Device, loaded: Loaded) -> None:
        del self._pending[pending.key]
        model = pending.model
        assert model is not None
        agent = Agent(
            key=pending.key,
            spec=pending.spec,
            device=device.id,
            model=with_digest(model, loaded),
            state="ready",
            used_ns=self._state.now_ns,
        )
        self._admitted(agent, pending.waiters)

    def _lost(self, pending: Pending, error: ErrorInfo) -> None:
        """A worker was lost that the answer depended on."""
        if self._once_more is None or pending.again:
            self._fail(pending, error)
            return
        del self._pending[pending.key]
        for (peer, _), message in pending.waiters.items():
            self._once_more(peer, message)

    def _roll_back(self, pending: Pending, device: Device) -> None:
        """The ledger as it was, and the worker told so."""
        reservation = pending.reservation
        assert reservation is not None
        pending.reservation = None
        device.ledger.rollback(reservation)
        claim = reservation.claim
        self._loading.unload(device, pending.key, claim.model, claim.kv_type)

    def _fail(self, pending: Pending, error: ErrorInfo) -> None:
        del self._pending[pending.key]
        self._state.log("info", "register_refused", agent=str(pending.key), reason=error.reason)
        for peer, rid in pending.waiters:
            self._state.fail(peer, rid, error)

    def _progress(self, pending: Pending, stage: str, total: int = 0, note: str = "") -> None:
        for peer, rid in pending.waiters:
            self._state.to_client(peer, Progress(rid=rid, stage=stage, total=total, note=note))


def with_digest(model: ModelInfo, loaded: Loaded) -> ModelInfo:
    """``model`` with the content digest, where the load has found it."""
    return msgspec.structs.replace(model, digest=loaded.digest or model.digest)
