"""Everything the broker knows (*pure*), and the effects of the event at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vram_conductor.broker.agents.sweep import SweepLog
from vram_conductor.broker.effects import Append, Effect, Log, SendClient, SendWorker
from vram_conductor.broker.jobs.job import Job, JobTable
from vram_conductor.broker.jobs.queue import JobQueue
from vram_conductor.broker.journal.records import AgentUsed, Record
from vram_conductor.broker.leases.tenure import Tenure
from vram_conductor.broker.ledger.decisions import LeaseKey
from vram_conductor.broker.registry import Agent, Registry
from vram_conductor.broker.sessions import Sessions
from vram_conductor.broker.timers import Timers
from vram_conductor.broker.workers.devices import Device
from vram_conductor.protocol.commands import ToWorker
from vram_conductor.protocol.config import Config
from vram_conductor.protocol.errors import ErrorInfo
from vram_conductor.protocol.keys import Quota
from vram_conductor.protocol.messages import BrokerMessage, Error

MS = 1_000_000
"""Nanoseconds of a millisecond."""

Level = Literal["debug", "info", "warning", "error"]


class State:
    """Shared by the flows; ``now_ns`` and ``effects`` belong to the event being handled."""

    def __init__(
        self,
        config: Config,
        broker_epoch: int,
        now_ns: int,
        version: str = "",
        unix_ns: int | None = None,
    ) -> None:
        self.config = config
        self.version = version
        self.broker_epoch = broker_epoch
        self.started_ns = now_ns
        self.now_ns = now_ns
        self._unix_offset_ns = 0 if unix_ns is None else unix_ns - now_ns
        self.effects: list[Effect] = []
        self.timers = Timers()
        self.sessions = Sessions(broker_epoch)
        self.devices: dict[str, Device] = {}
        self.registry = Registry()
        self.sweeps = SweepLog()
        self.jobs = JobTable()
        self.queue: JobQueue[Job] = JobQueue(
            config.broker.queued_jobs_max, config.broker.queued_jobs_per_agent_max
        )
        self.leases: dict[LeaseKey, Tenure] = {}
        self.quotas: Mapping[str, Quota] = {}
        """Of principals that have one."""
        self.draining = False
        self.journal_trouble = ""
        self.dispatch_due: set[str] = set()
        """Devices for which a job may be able to leave the queue."""
        self.admission_due: set[str] = set()
        """Devices whose suspended agents may fit again."""
        self._last_op = 0

    def next_op(self) -> int:
        """A fresh command number of this broker epoch."""
        self._last_op += 1
        return self._last_op

    def serves(self, device: str) -> bool:
        """Whether a worker of this device would be welcome: all are where none is configured."""
        configured = self.config.device
        return not configured or any(device == item.id for item in configured)

    def in_ms(self, after_ms: int) -> int:
        """The moment ``after_ms`` milliseconds from now."""
        return self.now_ns + after_ms * MS

    def unix_ns(self) -> int:
        """The time of day, for what has to make sense to the next broker."""
        return self.now_ns + self._unix_offset_ns

    def used(self, agent: Agent) -> None:
        """The agent is used now; the next broker has to know it where that decides something."""
        agent.used_ns = self.now_ns
        if agent.spec.ttl_s is not None:
            self.append(AgentUsed(agent=agent.key, used_unix_ns=self.unix_ns()))

    def forget_lease(self, tenure: Tenure) -> None:
        """A lease is over, pending or held: jobs and agents may find room."""
        del self.leases[tenure.key]
        for peer in tenure.owners:
            session = self.sessions.find(peer)
            if session is not None:
                session.leases.discard(tenure.key)
        self.admission_due.add(tenure.device)
        self.dispatch_due.add(tenure.device)

    def to_client(self, peer: bytes | None, message: BrokerMessage) -> None:
        """Send to a session; nothing happens if it is gone."""
        if peer is not None and self.sessions.find(peer) is not None:
            self.effects.append(SendClient(peer, message))

    def fail(self, peer: bytes | None, rid: bytes, error: ErrorInfo) -> None:
        """Send ERROR to a session."""
        self.to_client(peer, Error(rid=rid, error=error))

    def to_worker(self, peer: bytes, message: ToWorker, raw: Sequence[bytes] = ()) -> None:
        self.effects.append(SendWorker(peer, message, list(raw)))

    def append(self, record: Record) -> None:
        """Write to the journal."""
        self.effects.append(Append(record))

    def log(self, level: Level, event: str, **fields: Any) -> None:
        self.effects.append(Log(level, event, fields))
