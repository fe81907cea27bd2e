"""FIT (*pure*): what of a model would be admitted, on every device and with every KV type."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import msgspec

from vram_conductor.broker.agents.estimates import Estimates
from vram_conductor.broker.agents.fit_search import Search, Searching
from vram_conductor.broker.agents.fitting import Fitting
from vram_conductor.broker.agents.spec import spec_of
from vram_conductor.broker.errors import draining_error, no_worker_error
from vram_conductor.broker.journal.records import AgentSpec
from vram_conductor.broker.sessions import Session
from vram_conductor.broker.state import State
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol import limits
from vram_conductor.protocol.errors import (
    LEDGER_DENY,
    Code,
    ErrorInfo,
    ResourceExhausted,
    error_from_info,
)
from vram_conductor.protocol.fitting import KV_TYPES, Fit, FitDevice, FitReport, FitRow
from vram_conductor.protocol.messages import Ok, Progress, Register
from vram_conductor.protocol.values import AgentKey, KVType

SURVEYS_MAX = 16
"""FITs at once, over all clients: each asks the workers what REGISTERs are waiting to ask."""

ROUNDS_MAX = 4
"""What was found is looked for again where others came meanwhile; then it is given up."""

_NOBODY = "(fit)"
"""No agent can be called so."""

_QUOTA = "quota_exceeded"


@dataclass(slots=True, eq=False)
class Survey:
    """One FIT. ``rounds``: how often something had to be looked for again."""

    peer: bytes
    principal: str
    message: Fit
    searches: list[Search] = field(default_factory=list)
    rounds: int = 0


class FitDesk:
    """All FITs under way."""

    def __init__(self, state: State, estimates: Estimates, fitting: Fitting) -> None:
        self._state = state
        self._searching = Searching(state, estimates, fitting)
        self._surveys: dict[tuple[bytes, bytes], Survey] = {}

    def __len__(self) -> int:
        return len(self._surveys)

    def fit(self, session: Session, message: Fit, devices: tuple[str, ...]) -> None:
        """Begin; OK or ERROR follows. The same request again waits for the same answer.

        Raises Unavailable ``draining``, ``no_worker``; ResourceExhausted ``too_many_waiters``.
        """
        state, who = self._state, (session.peer, message.rid)
        if who in self._surveys:
            return
        if state.draining:
            raise error_from_info(draining_error())
        if not any(state.devices[name].ready for name in devices):
            raise error_from_info(no_worker_error(*devices))
        if len(self._surveys) >= SURVEYS_MAX or any(peer == who[0] for peer, _ in self._surveys):
            raise ResourceExhausted(
                "too_many_waiters",
                "another FIT is under way, of this session or of too many others; wait for its "
                "answer, then ask again",
                retryable=True,
                limit=SURVEYS_MAX,
            )
        key = AgentKey(session.principal, _NOBODY)
        survey = self._surveys[who] = Survey(session.peer, session.principal, message)
        for device in devices:
            for kv_type in KV_TYPES:
                spec = self._spec(session, message, device, kv_type)
                over = partial(self._check, survey)
                survey.searches.append(Search(key, device, spec, over))
        state.to_client(session.peer, Progress(rid=message.rid, stage="estimate"))
        for search in survey.searches:
            self._searching.begin(search)

    def cancel(self, principal: str, rid: bytes, error: ErrorInfo) -> bool:
        """CANCEL by rid. False if none of the principal's has it."""
        found = [
            survey
            for (_, known), survey in self._surveys.items()
            if known == rid and survey.principal == principal
        ]
        for survey in found:
            self._fail(survey, error)
        return bool(found)

    def client_left(self, peer: bytes) -> None:
        """A session has ended: nobody wants its answers."""
        for survey in [item for item in self._surveys.values() if item.peer == peer]:
            self._forget(survey)

    def end(self, error: ErrorInfo) -> None:
        """End all of them."""
        for survey in list(self._surveys.values()):
            self._fail(survey, error)

    # --- parts --------------------------------------------------------------------------------

    def _spec(self, session: Session, message: Fit, device: str, kv_type: KVType) -> AgentSpec:
        """An agent that leaves its context to the model's training, at most."""
        request = Register(
            rid=message.rid,
            agent=_NOBODY,
            model=message.model,
            kv_type=kv_type,
            device=device,
            slots=message.slots,
        )
        spec = spec_of(request, self._state.config.broker, bare_path=session.same_user_ipc)
        return msgspec.structs.replace(spec, n_ctx=limits.N_CTX_MAX)

    def _check(self, survey: Survey) -> None:
        """Answer when all searches are over, with what holds at this very moment."""
        if (survey.peer, survey.message.rid) not in self._surveys:
            return
        if not all(search.over for search in survey.searches):
            return
        rows = [self._searching.row(search) for search in survey.searches]
        outdated = [s for s, row in zip(survey.searches, rows, strict=True) if row is None]
        if outdated:
            survey.rounds += 1
            if survey.rounds > ROUNDS_MAX:
                self._fail(survey, _outdated())
                return
            for search in outdated:
                search.over = False
            for search in outdated:
                self._searching.begin(search)
            return
        errors = [search.error for search in survey.searches if search.claim is None]
        mistakes = [e for e in errors if e is not None and e.reason not in (LEDGER_DENY, _QUOTA)]
        if len(mistakes) == len(survey.searches):
            self._fail(survey, mistakes[0])
            return
        report = self._report(survey, [row for row in rows if row is not None])
        self._forget(survey)
        body = msgspec.to_builtins(report)
        self._state.to_client(survey.peer, Ok(rid=survey.message.rid, body=body))

    def _report(self, survey: Survey, rows: list[FitRow]) -> FitReport:
        model = next((search.model for search in survey.searches if search.model), None)
        names = sorted({search.device for search in survey.searches})
        return FitReport(
            model=survey.message.model,
            slots=survey.message.slots,
            arch=model.arch if model else "",
            file_bytes=model.file_bytes if model else 0,
            n_ctx_train=model.n_ctx_train if model else 0,
            devices=[_figures(self._state.devices[name]) for name in names],
            rows=rows,
        )

    def _fail(self, survey: Survey, error: ErrorInfo) -> None:
        self._forget(survey)
        self._state.fail(survey.peer, survey.message.rid, error)

    def _forget(self, survey: Survey) -> None:
        del self._surveys[survey.peer, survey.message.rid]
        for search in survey.searches:
            self._searching.cancel(search)


def _figures(device: Device) -> FitDevice:
    ledger = device.ledger
    totals = ledger.totals()
    return FitDevice(
        device=device.id,
        mode=ledger.spec.mode,
        cap_bytes=totals.cap_bytes,
        promised_bytes=totals.promised_bytes,
        base_bytes=totals.base_bytes,
        leases_bytes=totals.leases_bytes,
        foreign_bytes=totals.foreign_bytes,
        free_bytes=totals.free_bytes,
        agents=totals.agents,
        host_cap_bytes=totals.host_cap_bytes,
        host_promised_bytes=totals.host_promised_bytes,
    )


def _outdated() -> ErrorInfo:
    return ErrorInfo(
        Code.ABORTED,
        "estimate_outdated",
        "agents kept coming and going while it was found out what fits; try again",
        retryable=True,
        retry_after_ms=100,
    )
