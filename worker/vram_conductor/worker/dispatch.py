"""Commands of the broker, one method each; each is answered exactly once.

While things are hauled, commands that would change what is where wait, in order, and so does what
must not overtake them. A RUN is taken in, a CANCEL is heard at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from vram_conductor.protocol.commands import (
    Budget,
    CancelRun,
    Command,
    Copy,
    Drain,
    Failed,
    Forget,
    Load,
    Loaded,
    Run,
    Unload,
    WorkerOk,
)
from vram_conductor.protocol.errors import FailedPrecondition, NotFound, Unavailable
from vram_conductor.protocol.values import AgentKey, ConversationKey
from vram_conductor.worker.agents import Agents, Sizes
from vram_conductor.worker.copying import Copying
from vram_conductor.worker.ends import Ends
from vram_conductor.worker.intake import take_transcript
from vram_conductor.worker.job import Job
from vram_conductor.worker.jobs import Jobs
from vram_conductor.worker.outbox import Outbox, info_of
from vram_conductor.worker.parking import Parking
from vram_conductor.worker.preparing import Preparing
from vram_conductor.worker.residency import Residency
from vram_conductor.worker.shared_store import SharedStore
from vram_conductor.worker.traffic import Traffic

log = logging.getLogger(__name__)


def draining() -> Unavailable:
    """Why a job that could run elsewhere, or later, does not run here."""
    return Unavailable(
        "worker_draining", "this worker is leaving; the next one can do it", retryable=True
    )


class Dispatch:
    """Takes commands.

    Attributes:
        drains: the DRAIN commands that are being done; empty: none is.
        drain_ns: when they give up waiting.
    """

    def __init__(
        self,
        residency: Residency,
        jobs: Jobs,
        agents: Agents,
        ends: Ends,
        parking: Parking,
        store: SharedStore,
        outbox: Outbox,
        clock: Callable[[], int],
        preparing: Preparing,
        traffic: Traffic,
    ) -> None:
        self._residency = residency
        self._jobs = jobs
        self._agents = agents
        self._ends = ends
        self._parking = parking
        self._store = store
        self._outbox = outbox
        self._clock = clock
        self._preparing = preparing
        self._traffic = traffic
        self._copying = Copying(residency, jobs, store, outbox, traffic)
        self._deferred: deque[tuple[Command, Sequence[bytes]]] = deque()
        self.drains: list[Drain] = []
        self.drain_ns = 0

    def handle(self, command: Command, raw: Sequence[bytes], now_ns: int) -> None:
        """Take a command, now or as soon as it can be; whatever goes wrong is its own FAILED."""
        if self._must_wait(command):
            self._deferred.append((command, raw))
        else:
            self._take(command, raw, now_ns)

    def go_on(self, now_ns: int) -> bool:
        """Take what had to wait, as far as it need wait no more; whether there was anything."""
        took = False
        while self._deferred and self._traffic.haul is None and not self._traffic.rests:
            self._take(*self._deferred.popleft(), now_ns)
            took = True
        return took

    def drop_deferred(self) -> None:
        """Forget what has not been taken yet: nobody waits for an answer any more."""
        self._deferred.clear()

    def _must_wait(self, command: Command) -> bool:
        match command:
            case Drain():
                return False
            case CancelRun():
                ops = {item.op for item, _ in self._deferred if isinstance(item, Run)}
                return command.run_op in ops
            case Run(conversation=key):
                if any(_names(item, key.agent_key) for item, _ in self._deferred):
                    return True
                if self._copying.agent == key.agent_key:
                    return True
                # Its transcript may just be looked at, to see what is worth parking.
                known = self._residency.conversations.get(key)
                pool = known.pool if known else None
                return pool is not None and self._traffic.hauled(pool.key)
            case _:
                pass
        return self._traffic.haul is not None or bool(self._deferred)

    def _take(self, command: Command, raw: Sequence[bytes], now_ns: int) -> None:
        try:
            self._dispatch(command, raw, now_ns)
        except Exception as error:
            self._fail(command, error)

    def _fail(self, command: Command, error: Exception) -> None:
        info = info_of(error)
        if info.reason == "internal_error":
            log.error("%s failed", type(command).__name__, exc_info=error)
        job = command.job if isinstance(command, Run) else 0
        self._outbox.reply(Failed, command, error=info, job=job)

    def _dispatch(self, command: Command, raw: Sequence[bytes], now_ns: int) -> None:
        match command:
            case Run():
                self._run(command, raw, now_ns)
                return
            case CancelRun():
                job = self._jobs.find(command.broker_epoch, command.run_op)
                if job is not None:
                    self._ends.done(job, "cancelled")
                return
            case Load():
                self._load(command, now_ns)
                return
            case Copy():
                self._copying.begin(command)
                return
            case Drain():
                self._start_drain(command, now_ns)
                return
            case Unload():
                self._unload(command, now_ns)
            case Forget():
                self.forget(command.conversation)
            case Budget():
                self._agents.set_budget(command.budget_bytes, now_ns)
            case _:
                raise FailedPrecondition(
                    "unexpected_command", f"{type(command).__name__} is not for the engine"
                )
        self._outbox.reply(WorkerOk, command)

    def _load(self, command: Load, now_ns: int) -> None:
        self._refuse_while_draining()
        self._agents.set_budget(command.budget_bytes, now_ns)
        begin = self._clock()

        def done(sizes: Sizes | Exception) -> None:
            if isinstance(sizes, Exception):
                self._fail(command, sizes)
                return
            self._outbox.reply(
                Loaded,
                command,
                weights_bytes=sizes.weights_bytes,
                pool_bytes=sizes.pool_bytes,
                scratch_bytes=sizes.scratch_bytes,
                digest=sizes.digest,
                ms=(self._clock() - begin) / 1e6,
            )

        self._agents.load(command, done)

    def _unload(self, command: Unload, now_ns: int) -> None:
        self._traffic.quiesce()
        for job in self._jobs.of_agent(command.agent):
            self._ends.done(job, "cancelled")
        for conversation in self._residency.of_agent(command.agent):
            self.forget(conversation.key)
        self._agents.unload(command)
        if command.budget_bytes:
            # 0 is what the field is when it is left out; a budget of 0 comes with BUDGET.
            self._agents.set_budget(command.budget_bytes, now_ns)

    def forget(self, key: ConversationKey) -> None:
        """Forget a conversation and its states; its job ends. Idempotent."""
        known = self._residency.conversations.get(key)
        if known is not None and known.pool is not None:
            self._traffic.quiesce([known.pool.key])
        job = self._jobs.of_conversation(key)
        if job is not None:
            self._ends.done(job, "cancelled")
        conversation = self._residency.conversations.pop(key, None)
        if conversation is not None and conversation.slot and conversation.pool:
            self._parking.release(conversation.pool, conversation.slot)
        self._store.delete(key)
        self._residency.revision += 1

    def _run(self, command: Run, raw: Sequence[bytes], now_ns: int) -> None:
        self._refuse_while_draining()
        if self._jobs.find(command.broker_epoch, command.op) is not None:
            log.warning("op %d came twice; the second is ignored", command.op)
            return
        key = command.conversation
        agent = self._residency.agents.get(key.agent_key)
        if agent is None:
            raise NotFound(
                "unknown_agent",
                f"{key.agent_key} is not loaded on this worker; load it first",
                retryable=True,
            )
        if self._jobs.of_conversation(key) is not None:
            raise FailedPrecondition(
                "conversation_busy", f"{key} has a running job; wait for it, or cancel it"
            )
        conversation = self._residency.conversation(key)
        take_transcript(conversation.transcript, command, raw)
        timeout_ms = command.timeout_ms
        job = Job(
            run=command,
            seq=self._jobs.next_seq(),
            agent=agent,
            conversation=conversation,
            pool=self._residency.pools[agent.pool],
            waiting_ns=now_ns,
            deadline_ns=None if timeout_ms is None else now_ns + timeout_ms * 1_000_000,
        )
        conversation.used_ns = now_ns
        self._jobs.add(job)
        # Bad input is refused as soon as it is known, whatever the queue looks like.
        self._preparing.ask(job)

    def _refuse_while_draining(self) -> None:
        if self.drains:
            raise draining()

    def _start_drain(self, command: Drain, now_ns: int) -> None:
        end_ns = now_ns + command.drain_ms * 1_000_000
        self.drain_ns = min(end_ns, self.drain_ns) if self.drains else end_ns
        self.drains.append(command)
        for job in self._jobs.waiting():
            if not job.announced:
                self._ends.failed(job, draining())


def _names(command: Command, agent: AgentKey) -> bool:
    """Whether a command is about an agent, or all of them."""
    match command:
        case Load() | Unload():
            return command.agent == agent
        case Run() | Forget():
            return command.conversation.agent_key == agent
        case Copy():
            return command.target.agent_key == agent
        case _:
            return False
