"""What would an agent take, and where? (*pure*): ESTIMATE to every candidate, until all agree.

The answer is for one pool shape. When other agents come or go meanwhile, the ledger calls it
stale and the question is asked again for the new shape; the worker has most answers cached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.broker.agents.asking import Asking, Question
from vram_conductor.broker.errors import bad_reply_error
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.ledger import admission
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.claims import Claim, pad_cells
from vram_conductor.broker.ledger.decisions import Admit, Deny, Stale
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Estimate, Estimated, Failed
from vram_conductor.protocol.errors import Code, ConductorError, ErrorInfo
from vram_conductor.protocol.values import AgentKey, ModelInfo, PoolShape

ROUNDS_MAX = 32
"""Questions per registration. Only others' coming and going makes more than two."""

_DEVICE_TROUBLE = {
    Code.INTERNAL,
    Code.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED,
    Code.CANCELLED,
    Code.ABORTED,
    Code.RESOURCE_EXHAUSTED,
    Code.DATA_LOSS,
}
"""An estimate that failed like this says nothing about the request itself."""

Answer = Admit | Refusal | ErrorInfo
"""Where it fits; why it fits nowhere; or what is wrong with the request."""


@dataclass(slots=True)
class Inquiry:
    """One agent's question.

    Attributes:
        requests: per device the claim, or why there is none.
        models: what each device's worker says about the file; ``estimated``: all of its answer.
        mistakes: answers that blame the request, per device.
        lost: devices that lost their worker meanwhile.
        open: the unanswered questions, per device.
        returning: the agent was admitted before.
    """

    key: AgentKey
    spec: AgentSpec
    devices: tuple[str, ...]
    on_answer: Callable[[Answer], None]
    requests: dict[str, Claim | Deny] = field(default_factory=dict)
    models: dict[str, ModelInfo] = field(default_factory=dict)
    estimated: dict[str, Estimated] = field(default_factory=dict)
    mistakes: dict[str, ErrorInfo] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    open: dict[str, Question] = field(default_factory=dict)
    rounds: int = 0
    returning: bool = False

    def claim(self, device: str) -> Claim:
        """The claim that was admitted there."""
        request = self.requests[device]
        assert isinstance(request, Claim)
        return request


class Estimates:
    """Asks, collects, decides."""

    def __init__(self, state: State, asking: Asking) -> None:
        self._state = state
        self._asking = asking

    def ask(self, inquiry: Inquiry) -> None:
        """Ask all of the inquiry's devices; ``on_answer`` is called once, perhaps at once."""
        spec = inquiry.spec
        alone = PoolShape(pad_cells(spec.n_ctx), spec.slots, spec.kv_type)
        for name in inquiry.devices:
            device = self._state.devices[name]
            model = device.model_ids.get(spec.model)
            shape = alone
            if model is not None:
                shape = device.ledger.shape_with(
                    model, spec.kv_type, inquiry.key, spec.n_ctx, spec.slots
                )
            self._send(inquiry, device, shape)
        self._decide(inquiry)

    def cancel(self, inquiry: Inquiry) -> None:
        """Nobody wants the answer any more; ``on_answer`` is not called."""
        for question in inquiry.open.values():
            self._asking.cancel(question)
        inquiry.open.clear()

    def _send(self, inquiry: Inquiry, device: Device, shape: PoolShape) -> None:
        if not device.ready:
            inquiry.requests[device.id] = admission.no_estimate(device.ledger, None)
            return
        spec = inquiry.spec
        inquiry.open[device.id] = self._asking.ask(
            device,
            lambda epoch, op: Estimate(
                broker_epoch=epoch,
                op=op,
                model=spec.model,
                shape=shape,
                n_ctx=spec.n_ctx,
                cap_bytes=device.ledger.cap_bytes,
                bare_path=spec.bare_path,
            ),
            lambda message: self._reply(inquiry, device, message),
            lambda error: self._failed(inquiry, device, error),
        )

    def _reply(self, inquiry: Inquiry, device: Device, message: ReplyMessage) -> None:
        match message:
            case Estimated():
                self._estimated(inquiry, device, message)
            case Failed():
                self._failed(inquiry, device, message.error)
            case _:
                self._failed(inquiry, device, bad_reply_error(device.id, message))

    def _estimated(self, inquiry: Inquiry, device: Device, message: Estimated) -> None:
        spec = inquiry.spec
        inquiry.open.pop(device.id, None)
        try:
            claim = Claim.of(message, inquiry.key, spec.n_ctx, spec.slots)
        except ConductorError as error:
            inquiry.requests[device.id] = admission.no_estimate(device.ledger, error.info)
        else:
            inquiry.requests[device.id] = claim
            inquiry.models[device.id] = message.model
            inquiry.estimated[device.id] = message
            device.note_model(spec.model, message.model.model)
        self._decide(inquiry)

    def _failed(self, inquiry: Inquiry, device: Device, error: ErrorInfo) -> None:
        inquiry.open.pop(device.id, None)
        if not device.ready:
            inquiry.lost.add(device.id)
        file_bytes = error.details.get("file_bytes")
        deny = None
        if isinstance(file_bytes, int) and error.code in (
            Code.RESOURCE_EXHAUSTED,
            Code.OUT_OF_RANGE,
        ):
            deny = admission.check_file(device.ledger, file_bytes)
        if deny is None:
            deny = admission.no_estimate(device.ledger, error)
            if error.code not in _DEVICE_TROUBLE:
                inquiry.mistakes[device.id] = error
        inquiry.requests[device.id] = deny
        self._decide(inquiry)

    def _decide(self, inquiry: Inquiry) -> None:
        """All answers are here: choose, or ask again where the shape has changed."""
        if inquiry.open or len(inquiry.requests) < len(inquiry.devices):
            return
        if len(inquiry.mistakes) == len(inquiry.devices):
            inquiry.on_answer(inquiry.mistakes[inquiry.devices[0]])
            return
        devices = {name: self._state.devices[name] for name in inquiry.devices}
        inquiry.lost |= {name for name, device in devices.items() if not device.ready}
        ledgers = {name: device.ledger for name, device in devices.items()}
        answer = admission.place(
            ledgers, inquiry.requests, self._state.now_ns, returning=inquiry.returning
        )
        if not isinstance(answer, Stale):
            inquiry.on_answer(answer)
            return
        inquiry.rounds += 1
        if inquiry.rounds > ROUNDS_MAX:
            inquiry.on_answer(
                ErrorInfo(
                    Code.ABORTED,
                    "estimate_outdated",
                    "other agents of the same model kept coming and going; try again",
                    retryable=True,
                    retry_after_ms=100,
                )
            )
            return
        del inquiry.requests[answer.device]
        self._send(inquiry, self._state.devices[answer.device], answer.shape)
        self._decide(inquiry)
