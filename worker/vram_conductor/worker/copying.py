"""COPY: a conversation begins with a copy of what another has parked.

Only the parked state is copied: after every job it covers what the slot holds. It is copied beside
the engine thread, under the store's lock; RUNs of the agent wait for it. No other state is given up
for it: a copy without KV is computed again, which costs time, never a conversation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from vram_conductor.protocol.commands import Copied, Copy
from vram_conductor.protocol.errors import FailedPrecondition, NotFound
from vram_conductor.protocol.values import AgentKey
from vram_conductor.worker.engine import Tokens
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.residency import Conversation, Residency
from vram_conductor.worker.shared_store import SharedStore
from vram_conductor.worker.store import ParkedMeta
from vram_conductor.worker.traffic import Haul, Traffic

log = logging.getLogger(__name__)

MISSING = "state_missing"


@dataclass
class _Found:
    """What the hauler has copied; nothing where ``meta`` is None."""

    meta: ParkedMeta | None = None
    ids: Tokens | None = None


class Copying:
    """Carries out COPY, one at a time.

    Attributes:
        agent: whose conversation is being copied now; None: nobody's.
    """

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        store: SharedStore,
        outbox: Outbox,
        traffic: Traffic,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._store = store
        self._outbox = outbox
        self._traffic = traffic
        self.agent: AgentKey | None = None

    def begin(self, command: Copy) -> None:
        """Copy, and answer when that is done. No haul is under way.

        Raises:
            NotFound: ``unknown_agent``.
            FailedPrecondition: ``conversation_busy``: the copy has a job already.
        """
        agent = command.target.agent_key
        if agent not in self._residency.agents or command.source.agent_key != agent:
            raise NotFound(
                "unknown_agent",
                f"{agent} is not loaded on this worker; load it first",
                retryable=True,
            )
        if self._jobs.of_conversation(command.target) is not None:
            raise FailedPrecondition(
                "conversation_busy", f"{command.target} has a running job; it is no copy any more"
            )
        source = self._residency.conversation(command.source)
        target = self._residency.conversation(command.target)
        found = _Found()
        self.agent = agent

        def work() -> None:
            self._copy(source, target, found)

        def then(error: Exception | None) -> None:
            self.agent = None
            self._finish(command, target, found, error)

        self._traffic.begin(Haul((frozenset(), frozenset()), work, then))

    def _copy(self, source: Conversation, target: Conversation, found: _Found) -> None:
        """On the hauler."""
        with self._store.lock:
            state = self._store.read(source.key)
            if state is None:
                return
            meta, view = state
            try:
                self._write(target, meta, view)
            finally:
                view.release()
            found.meta, found.ids = meta, source.parked_ids

    def _write(self, target: Conversation, meta: ParkedMeta, view: memoryview) -> None:
        agent = self._residency.agents[target.key.agent_key]
        size_bytes = meta.payload_bytes
        room = self._store.writer(target.key, size_bytes, max(size_bytes, agent.state_bytes))
        try:
            # NumPy lets other threads go on meanwhile.
            np.copyto(np.frombuffer(room, np.uint8), np.frombuffer(view, np.uint8))
        finally:
            room.release()
        self._store.commit(replace(meta, conversation=target.key))

    def _finish(
        self, command: Copy, target: Conversation, found: _Found, error: Exception | None
    ) -> None:
        reason = ""
        if error is not None:
            info = info_of(error)
            bug = error if info.reason == "internal_error" else None
            log.warning("%s is not copied: %s", command.source, info.message, exc_info=bug)
            reason = f"not_copied: {info.reason}"
        elif found.meta is None:
            reason = MISSING
        if found.meta is not None and error is None:
            target.parked_ids, target.lost = found.ids, ""
            tokens, size_bytes = found.meta.n_tokens, self._store.bytes(target.key)
        else:
            target.lost, tokens, size_bytes = reason, 0, 0
        self._residency.revision += 1
        self._outbox.reply(Copied, command, n_tokens=tokens, state_bytes=size_bytes, reason=reason)
