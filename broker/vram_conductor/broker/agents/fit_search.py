"""The largest context of a model that would be admitted on one device, with one KV type (*pure*).

Every number is an answer of the ledger to the very question that REGISTER asks: first with the
context that the model was trained with, then with what the fit probe says of the refusal, then
with that answer, to be sure. Where a quota or host memory is what limits, the interval between
what was admitted and what was refused is halved, down to 256 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec

from vram_conductor.broker.agents.estimates import Answer, Estimates, Inquiry
from vram_conductor.broker.agents.fitting import Fitting, Probe
from vram_conductor.broker.agents.spec import within_training
from vram_conductor.broker.errors import no_worker_error
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.ledger import refusal
from vram_conductor.broker.ledger.admission import Refusal
from vram_conductor.broker.ledger.claims import Claim
from vram_conductor.broker.ledger.decisions import Admit, DenyCode
from vram_conductor.broker.permissions import within_quota
from vram_conductor.broker.state import State
from vram_conductor.protocol import limits
from vram_conductor.protocol.commands import Estimated
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.fitting import FitLimit, FitRow
from vram_conductor.protocol.values import AgentKey, ModelInfo

_LIMITS: dict[DenyCode, Literal["device", "host"]] = {
    DenyCode.CAP: "device",
    DenyCode.HOST: "host",
}


@dataclass(slots=True, eq=False)
class Search:
    """One KV type on one device.

    Attributes:
        key: of the agent that there would be; nobody else's.
        spec: what is asked about now.
        on_over: called at the end, perhaps before :meth:`Searching.begin` returns.
        low: the largest context that was admitted, as ``claim`` and ``estimated``; 0: none.
        high: the smallest one that was refused; None: none.
        exact: what the fit probe said; None: it was not asked.
        error: of the last refusal; ``limit``: its kind.
        model: what the worker says of the file.
    """

    key: AgentKey
    device: str
    spec: AgentSpec
    on_over: Callable[[], None]
    low: int = 0
    high: int | None = None
    exact: int | None = None
    claim: Claim | None = None
    estimated: Estimated | None = None
    error: ErrorInfo | None = None
    limit: FitLimit = ""
    model: ModelInfo | None = None
    inquiry: Inquiry | None = None
    probe: Probe | None = None
    over: bool = False


class Searching:
    """Asks for a search what REGISTER would ask, until nothing larger can be found."""

    def __init__(self, state: State, estimates: Estimates, fitting: Fitting) -> None:
        self._state = state
        self._estimates = estimates
        self._fitting = fitting

    def begin(self, search: Search) -> None:
        """From the beginning, also once more."""
        search.low, search.high, search.exact = 0, None, None
        search.claim = search.estimated = search.error = None
        search.over = False
        if self._state.devices[search.device].ready:
            self._ask(search, limits.N_CTX_MAX)
        else:
            self._finish(search, no_worker_error(search.device))

    def cancel(self, search: Search) -> None:
        """Nobody wants to know any more."""
        if search.inquiry is not None:
            self._estimates.cancel(search.inquiry)
        if search.probe is not None:
            self._fitting.cancel(search.probe)

    def row(self, search: Search) -> FitRow | None:
        """What was found, if the ledger still says so; None: it has to be looked for again."""
        claim, estimated = search.claim, search.estimated
        kv_type = search.spec.kv_type
        if claim is None or estimated is None:
            return FitRow(device=search.device, kv_type=kv_type, error=search.error)
        device = self._state.devices[search.device]
        decision = device.ledger.decide(claim, self._state.now_ns) if device.ready else None
        if not isinstance(decision, Admit):
            return None
        return FitRow(
            device=search.device,
            kv_type=kv_type,
            n_ctx=claim.n_ctx,
            limit=search.limit,
            pool_cells=claim.shape.cells,
            pool_slots=claim.shape.slots,
            weights_bytes=estimated.weights_bytes,
            kv_bytes=estimated.kv_bytes,
            compute_bytes=estimated.compute_bytes,
            recurrent_bytes=estimated.recurrent_bytes,
            scratch_bytes=estimated.scratch_bytes,
            state_bytes=estimated.state_bytes,
            requested_bytes=decision.requested_bytes,
            free_bytes=decision.free_bytes,
            shares_weights=decision.shares_weights,
        )

    def _ask(self, search: Search, n_ctx: int) -> None:
        search.spec = msgspec.structs.replace(search.spec, n_ctx=n_ctx)
        answer = partial(self._answered, search)
        search.inquiry = Inquiry(search.key, search.spec, (search.device,), answer)
        self._estimates.ask(search.inquiry)

    def _answered(self, search: Search, answer: Answer) -> None:
        inquiry = search.inquiry
        assert inquiry is not None
        if inquiry.lost:
            self._finish(search, no_worker_error(search.device))
            return
        search.model = inquiry.models.get(search.device, search.model)
        answer = within_quota(self._state, inquiry, answer)
        match answer:
            case Admit():
                self._admitted(search, inquiry)
            case Refusal():
                self._refused(search, answer)
            case ErrorInfo(reason="quota_exceeded"):
                search.limit = "quota"
                self._too_large(search, answer)
            case ErrorInfo():
                shorter = within_training(search.spec, answer)
                if shorter is None:
                    self._finish(search, answer)
                else:
                    self._ask(search, shorter.n_ctx)

    def _admitted(self, search: Search, inquiry: Inquiry) -> None:
        search.low = search.spec.n_ctx
        search.claim = inquiry.claim(search.device)
        search.estimated = inquiry.estimated[search.device]
        if search.high is not None:
            self._next(search)
            return
        trained = search.estimated.model.n_ctx_train
        search.limit = "training" if search.low == trained else "protocol"
        self._finish(search)

    def _refused(self, search: Search, answer: Refusal) -> None:
        error = refusal.error(answer, search.key.principal)
        limit = _LIMITS.get(answer.closest.code)
        if limit is None:
            self._finish(search, error)
            return
        search.limit = limit
        if search.exact is None:
            search.exact, search.high, search.error = 0, search.spec.n_ctx, error
            assert search.inquiry is not None
            search.probe = self._fitting.probe(
                search.inquiry, answer, lambda full: self._probed(search, full)
            )
        else:
            self._too_large(search, error)

    def _probed(self, search: Search, full: Refusal) -> None:
        search.exact = full.closest.largest_n_ctx_that_fits or 0
        if search.exact > search.low:
            self._ask(search, search.exact)
        else:
            self._next(search)

    def _too_large(self, search: Search, error: ErrorInfo) -> None:
        search.high, search.error = search.spec.n_ctx, error
        self._next(search)

    def _next(self, search: Search) -> None:
        """Ask about what may still be found between what was admitted and what was refused."""
        assert search.high is not None
        pad = limits.N_CTX_PAD
        middle = (search.low + search.high) // 2 // pad * pad
        if search.exact == 0 and search.low == 0:
            # Nothing fits, says the probe: the smallest one shows how much is missing.
            middle = pad if search.high > pad else 0
        if 0 < search.low == search.exact:
            # About the device the probe is exact, about host memory its guess is good.
            middle = 0 if search.limit == "device" else (search.low // pad + 1) * pad
        if not search.low < middle < search.high:
            self._finish(search)
        else:
            self._ask(search, middle)

    def _finish(self, search: Search, error: ErrorInfo | None = None) -> None:
        if error is not None:
            search.claim, search.error = None, error
        search.over = True
        search.on_over()
