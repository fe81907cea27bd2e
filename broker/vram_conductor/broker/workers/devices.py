"""One device as the broker sees it (*pure*): its ledger, its worker, its last sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from vram_conductor.broker.ledger.ledger import Ledger
from vram_conductor.broker.workers.links import Candidate, WorkerLink
from vram_conductor.protocol.commands import Place, Residency
from vram_conductor.protocol.config import DeviceConfig
from vram_conductor.protocol.status import Where
from vram_conductor.protocol.values import ConversationKey, DeviceInfo, Memory

_EWMA = 0.2
"""Weight of the newest job in the running mean of job times."""

_MODEL_IDS_MAX = 1_024


@dataclass(slots=True)
class Device:
    """State of one device.

    Attributes:
        link: the welcomed worker; None while there is none, since ``absent_ns``.
        candidate: a worker that waits for the verdict on ``link``.
        epoch: of the last worker that was welcomed.
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

    def forget_worker(self, now_ns: int) -> None:
        """There is no worker from now on; what it said is of the past."""
        self.link = self.residency = self.memory = None
        self.absent_ns = now_ns
        self.places.clear()
        self.surprises.clear()
