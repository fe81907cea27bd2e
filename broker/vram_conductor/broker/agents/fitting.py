"""The largest context that would fit (*pure*): a second question, after a deny."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from vram_conductor.broker.agents.asking import Asking, Question
from vram_conductor.broker.agents.estimates import Inquiry
from vram_conductor.broker.ledger import admission
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.claims import Claim, pad_cells
from vram_conductor.broker.ledger.decisions import Deny, DenyCode
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.links import ReplyMessage
from vram_conductor.protocol.commands import Estimate, Estimated
from vram_conductor.protocol.errors import ConductorError

ROUNDS_MAX = 4
"""The first answer is exact unless host memory is short; then the state's size is refined: a
guess in proportion, one on the line through two known sizes, and the question whether it holds."""


@dataclass(slots=True, eq=False)
class Fit:
    """A probe of one device. ``claim``: what is asked about; ``known``: the one that was answered
    before; ``n_ctx``: the best guess so far; ``question``: None when it is over."""

    probe: Probe
    deny: Deny
    claim: Claim
    question: Question | None = None
    n_ctx: int | None = None
    known: Claim | None = None
    rounds: int = 0


@dataclass(slots=True)
class Probe:
    """The probes of all devices that have refused an agent."""

    inquiry: Inquiry
    refusal: Refusal
    on_answer: Callable[[Refusal], None]
    fits: list[Fit] = field(default_factory=list)


class Fitting:
    """Fills ``largest_n_ctx_that_fits`` into denies."""

    def __init__(self, state: State, asking: Asking) -> None:
        self._state = state
        self._asking = asking

    def probe(
        self, inquiry: Inquiry, refusal: Refusal, on_answer: Callable[[Refusal], None]
    ) -> Probe:
        """Ask the workers of all devices that lack bytes, at the same time. ``on_answer`` is
        called once, perhaps at once."""
        probe = Probe(inquiry, refusal, on_answer)
        for deny in refusal.denies:
            device = self._state.devices.get(deny.device)
            asks = deny.code in (DenyCode.CAP, DenyCode.HOST)
            if deny.claim is not None and asks and device is not None and device.ready:
                probe.fits.append(Fit(probe, deny, deny.claim))
        for fit in probe.fits:
            self._send(fit)
        self._check(probe)
        return probe

    def cancel(self, probe: Probe) -> None:
        """Nobody wants the answer any more."""
        for fit in probe.fits:
            if fit.question is not None:
                self._asking.cancel(fit.question)

    def _send(self, fit: Fit) -> None:
        device = self._state.devices[fit.deny.device]
        claim, spec = fit.claim, fit.probe.inquiry.spec
        fit.rounds += 1
        fit.question = self._asking.ask(
            device,
            lambda epoch, op: Estimate(
                broker_epoch=epoch,
                op=op,
                model=spec.model,
                shape=claim.shape,
                n_ctx=claim.n_ctx,
                fit_bytes=device.ledger.fit_bytes(claim),
                cap_bytes=device.ledger.cap_bytes,
                bare_path=spec.bare_path,
            ),
            lambda message: self._reply(fit, message),
            lambda error: self._finish(fit),
        )

    def _reply(self, fit: Fit, message: ReplyMessage) -> None:
        device = self._state.devices[fit.deny.device]
        if not isinstance(message, Estimated):
            self._finish(fit)
            return
        spec = fit.probe.inquiry.spec
        train = message.model.n_ctx_train or None
        try:
            claim = Claim.of(message, fit.claim.agent, fit.claim.n_ctx, spec.slots)
            fixed = _fixed_bytes(fit.known, claim)
            n_ctx = admission.fit_n_ctx(device.ledger, claim, message.fit_cells, train, fixed)
        except ConductorError:
            self._finish(fit)
            return
        fit.known = claim
        settled = n_ctx == fit.n_ctx or fit.deny.code is DenyCode.CAP
        fit.n_ctx = n_ctx if fit.n_ctx is None else min(n_ctx, fit.n_ctx)
        if settled or n_ctx < 1 or fit.rounds >= ROUNDS_MAX or not device.ready:
            self._finish(fit)
            return
        self._refine(fit, n_ctx)

    def _refine(self, fit: Fit, n_ctx: int) -> None:
        """Ask again with the guessed context: its state's size is then no guess."""
        device = self._state.devices[fit.deny.device]
        spec, key = fit.probe.inquiry.spec, fit.probe.inquiry.key
        if key in device.ledger:
            self._finish(fit)
            return
        shape = device.ledger.shape_with(fit.claim.model, spec.kv_type, key, n_ctx, spec.slots)
        assert shape.cells >= pad_cells(n_ctx)
        fit.claim = dataclasses.replace(fit.claim, n_ctx=n_ctx, shape=shape)
        self._send(fit)

    def _finish(self, fit: Fit) -> None:
        fit.question = None
        self._check(fit.probe)

    def _check(self, probe: Probe) -> None:
        """Answer when all devices have."""
        if any(fit.question is not None for fit in probe.fits):
            return
        found = {fit.deny.device: fit.n_ctx for fit in probe.fits}
        probe.on_answer(
            Refusal(
                tuple(
                    dataclasses.replace(deny, largest_n_ctx_that_fits=found[deny.device])
                    if deny.device in found
                    else deny
                    for deny in probe.refusal.denies
                )
            )
        )


def _fixed_bytes(larger: Claim | None, smaller: Claim) -> int:
    """The part of a state that does not depend on the context, from two contexts' states."""
    if larger is None or larger.n_ctx <= smaller.n_ctx:
        return 0
    growth_bytes, tokens = larger.state_bytes - smaller.state_bytes, larger.n_ctx - smaller.n_ctx
    return max(0, smaller.state_bytes - smaller.n_ctx * growth_bytes // tokens)
