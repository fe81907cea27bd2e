"""One device as the broker sees it (*pure*): its ledger, its worker, its last sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.workers.links import Candidate, WorkerLink
from vram_conductor.protocol.commands import Place, Ready, Residency
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.status import Where
from vram_conductor.protocol.values import ConversationKey, DeviceInfo, Memory

_EWMA = 0.2
"""Weight of the newest job in the running mean of job times."""

_MODEL_IDS_MAX = 1_024

JOBS_WAIT_MS = 30_000
"""Jobs wait for an absent worker for so long; a restart takes a few seconds."""

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Departure:
    """How a device lost the worker that it had last. ``left``: it said W_BYE."""

    ready: Ready
    left: bool


@dataclass(slots=True)
class Device:
    """State of one device.

    Attributes:
        link: the welcomed worker; None while there is none, since ``absent_ns``.
        candidate: a worker that waits for the verdict on ``link``.
        epoch: of the last worker that was welcomed.
        departure: of the last worker that is gone; None before the first.
        given_up: epoch of the last worker that did not leave when asked; it may not come back.
        hold_until_ns: requests wait for the next worker until then, as DRAIN_DEVICE asked.
        info: what the last worker said about the device.
        memory: its last sample, from READY or a report; None while there is no worker.
        residency: the last report of the present worker.
        surprises: lines that are larger than what could be promised; logged once.
        places: where each conversation's KV is, as the present worker last said.
        job_ms: running mean of job times; None before the first.
        model_ids: what a model's name meant last time: spares a question, is never relied on.
    """

    config: DeviceConfig
    ledger: Ledger
    absent_ns: int
    epoch: int = 0
    link: WorkerLink | None = None
    candidate: Candidate | None = None
    departure: Departure | None = None
    given_up: int | None = None
    hold_until_ns: int = 0
    info: DeviceInfo | None = None
    memory: Memory | None = None
    residency: Residency | None = None
    places: dict[ConversationKey, Place] = field(default_factory=dict)
    job_ms: float | None = None
    model_ids: dict[str, str] = field(default_factory=dict)
    surprises: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.config.id

    @property
    def ready(self) -> bool:
        """Whether it has a worker that takes commands."""
        return self.link is not None and not self.link.draining

    @property
    def away(self) -> Literal["", "stopped", "lost"]:
        """What became of the last worker."""
        if self.departure is None:
            return ""
        return "stopped" if self.departure.left else "lost"

    @property
    def former_build(self) -> str:
        """Library build of the last worker, where the present one has another; empty: none has."""
        if self.departure is None or self.link is None:
            return ""
        former = self.departure.ready.build
        return former if former != self.link.ready.build else ""

    @property
    def patient_until_ns(self) -> int:
        """Until when jobs wait for the next worker, while there is none."""
        return max(self.absent_ns + JOBS_WAIT_MS * _NS_PER_MS, self.hold_until_ns)

    def note_model(self, name: str, model: str) -> None:
        """``name`` meant ``model`` just now."""
        if len(self.model_ids) >= _MODEL_IDS_MAX:
            self.model_ids.clear()
        self.model_ids[name] = model

    def saw_job(self, ms: float) -> None:
        """A job of ``ms`` milliseconds on the device ended."""
        old = self.job_ms
        self.job_ms = ms if old is None else old + _EWMA * (ms - old)

    def note_place(
        self, key: ConversationKey, where: Where, n_tokens: int, parked_bytes: int
    ) -> None:
        """Where the KV of a conversation is now."""
        self.places[key] = Place(
            conversation=key, where=where, n_tokens=n_tokens, parked_bytes=parked_bytes
        )

    def forget_worker(self, now_ns: int, *, left: bool) -> None:
        """There is no worker from now on; what it said is of the past."""
        assert self.link is not None
        self.departure = Departure(self.link.ready, left)
        self.link = self.residency = self.memory = None
        self.absent_ns = now_ns
        self.places.clear()
        self.surprises.clear()
